"""Sources: where a dataset's truth is. One module a kind, registered in ``registry``."""
