"""Text of requests and answers: tokenizer, detokenizer, sessions."""
