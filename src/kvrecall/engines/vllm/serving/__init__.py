"""vLLM as a server: its async engine, its OpenAI application, and additions to replies."""
