"""The chapters as a book: their differences, pages and figures."""
