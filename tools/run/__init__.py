"""Building the chapters' programs, starting them, and what they leave in Hugging Face's format."""
