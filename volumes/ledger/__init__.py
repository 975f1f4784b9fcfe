"""What each volume was last seen to hold, on this node and in the volume's own cluster."""
