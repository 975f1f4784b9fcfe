"""Image preheating: image -> plan -> pull -> pin -> heal."""
