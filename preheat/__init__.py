"""Images held ready: image -> plan -> pull -> pin -> heal."""
