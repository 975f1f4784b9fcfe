"""What registries say, how they are asked, and when."""
