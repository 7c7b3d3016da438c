"""An OpenAI-compatible HTTP server over `AsyncLLMEngine`."""
