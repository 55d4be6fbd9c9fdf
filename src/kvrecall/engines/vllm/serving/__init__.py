"""vLLM as a server: its async engine, its OpenAI application, and our answers in it."""
