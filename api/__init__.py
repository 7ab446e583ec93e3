"""The HTTP front end: translates OpenAI requests into native jobs and relays their text."""
