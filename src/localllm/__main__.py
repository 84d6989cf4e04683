"""`python -m localllm` is the same as the `localllm` command; the daemon is started this way."""

from localllm.cli.app import main

if __name__ == "__main__":
    main()
