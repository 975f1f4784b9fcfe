"""What is wanted, what is there, and what follows from both."""
