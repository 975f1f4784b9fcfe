"""One model of the node's volumes, made by a child process so that the agent cannot hang."""
