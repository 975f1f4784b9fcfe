"""Who keeps how much: budgets, the reserve, who gives room first, and how files leave."""
