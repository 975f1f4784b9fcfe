"""What a dataset is and needs next: its generations, its decisions, and how one follows another."""
