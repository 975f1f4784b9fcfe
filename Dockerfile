# The agent's image. docs/deploy.md explains the arguments.
#
# Debian, because the agent uses its Ceph client and the bindings that are built for its Python.
# The default has no registry in its name: the builder's own settings say where it is taken from.
# It is bookworm-20260918-slim.
ARG BASE=debian@sha256:3783cc01769c7b2b1b83a5c5ad96c815348e28ed7da68e2e3687004faa906251

# The Python libraries, stripped, in the environment that the agent runs in.
FROM ${BASE} AS libraries
# A pip configuration file that is mounted into the build: an index of your own.
ARG PIP_CONFIG_FILE=
COPY deploy/image/apt.sh /image/
# A secret, and no argument: its lines may hold a login, and arguments stay in the image's history.
RUN --mount=type=secret,id=apt_sources . /image/apt.sh \
    && apt-get install -y python3 python3-venv clang llvm libbpf-dev
COPY locks/runtime.txt locks/build.txt /src/locks/
RUN python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/nodeagent \
    && /opt/pip/bin/pip install --no-cache-dir --require-hashes -r /src/locks/build.txt \
    && /opt/pip/bin/pip --python /opt/nodeagent/bin/python install \
        --no-cache-dir --require-hashes -r /src/locks/runtime.txt \
    && find /opt/nodeagent -name '*.so*' -exec strip --strip-unneeded {} +

# The agent itself, below /agent: a layer of its own, the only large one that a new version changes.
FROM libraries AS agent
COPY . /src/
RUN cd /src && /opt/pip/bin/pip wheel --no-deps --no-build-isolation --no-index -w /wheel . \
    && /opt/pip/bin/pip --python /opt/nodeagent/bin/python install \
        --no-deps --no-index --no-cache-dir --root /agent /wheel/*.whl

FROM ${BASE} AS complete
ARG DEBIAN_LOCK=required
ARG CEPH_RELEASE=
COPY deploy/image/ locks/debian-*.txt /image/
RUN --mount=type=secret,id=apt_sources sh /image/install.sh && rm -r /image
COPY --from=libraries /opt/nodeagent /opt/nodeagent
RUN for module in rados rbd cephfs; do \
        ln -s /usr/lib/python3/dist-packages/$module.cpython-*.so \
            /opt/nodeagent/lib/python3.*/site-packages/; \
    done
COPY --from=agent /agent/ /

# What is in it, read from it; the library that writes it down stays out.
FROM complete AS contents
ARG REVISION=unknown
COPY --from=libraries /opt/pip /opt/pip
COPY deploy/image/sbom.py /image/
RUN /opt/pip/bin/python /image/sbom.py "${REVISION}" >/sbom.cdx.json

FROM complete
COPY --from=contents /sbom.cdx.json /usr/share/nodeagent/sbom.cdx.json
ENV PATH=/opt/nodeagent/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ARG BASE
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="nodeagent" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE}" \
      org.opencontainers.image.licenses="Apache-2.0"
# The label cannot be read off the agent, so a wrong one fails the build.
RUN test "$(nodeagent --version)" = "nodeagent, version ${VERSION}" \
    && rm -rf /root/.cache /tmp/*
ENTRYPOINT ["/opt/nodeagent/bin/nodeagent"]
CMD ["run"]
