"""Building and running the tests, and saying how long they take."""
