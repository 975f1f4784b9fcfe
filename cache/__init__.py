"""Dataset cache: dataset -> source -> store -> view. The kernel serves, this room only prepares."""
