"""Safe volumes: inventory -> findings; probe -> ledger -> guard."""
