"""Language models: text, GGUF and vLLM files, networks larger than memory."""
