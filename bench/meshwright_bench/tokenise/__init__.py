"""`bench tokenise`: time and memory of making a corpus of text into tokens."""
