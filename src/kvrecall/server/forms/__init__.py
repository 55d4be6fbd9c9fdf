"""The forms of a request beside OpenAI's: TGI's, vLLM's older one, MindIE's own and Triton's."""
