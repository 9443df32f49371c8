"""What clients send, field by field: OpenAI's names, Anthropic's for messages, and vLLM's for what they lack."""
