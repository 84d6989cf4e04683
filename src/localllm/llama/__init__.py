"""The only package that touches llama.cpp."""
