"""One model of the node's volumes, looked up in a child process so that nothing here can hang."""
