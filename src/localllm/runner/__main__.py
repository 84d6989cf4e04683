"""`python -m localllm.runner`, as the daemon starts it."""

from localllm.runner.main import main

if __name__ == "__main__":
    main()
