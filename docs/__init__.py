"""The pages of docs/ and what generates some of them."""
