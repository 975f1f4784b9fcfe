"""Docker Hub's names: the one registry that references, runtimes and login files know by name.

They are part of the reference grammar and of docker's login files, not a choice of ours; no other
registry is named in this project.
"""

NAME = "docker.io"  # as runtimes write it
INDEX = "index.docker.io"  # as docker writes it in older references and in login files
SERVER = "registry-1.docker.io"  # what answers
LOGIN_KEY = f"https://{INDEX}/v1/"  # docker's key of its login
HOSTS = frozenset({NAME, INDEX})
