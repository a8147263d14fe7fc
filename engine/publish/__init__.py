"""Publishing of what a run has trained: for LM Studio, Ollama and llama.cpp, or on the Hugging Face Hub, with a model
card."""
