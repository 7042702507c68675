"""The server: the engine behind the API of OpenAI's clients, in a process of its own."""
