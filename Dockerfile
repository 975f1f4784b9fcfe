# The agent's image. docs/deploy.md explains the arguments and what each part costs.
#
# Debian, because the agent uses its Ceph client and bindings, which are built for its Python 3.11.
ARG BASE=docker.io/library/debian:bookworm-20250520-slim

FROM ${BASE} AS sources
# A time such as 20251115T000000Z pins every Debian package to snapshot.debian.org's state of it.
ARG DEBIAN_SNAPSHOT=
# A release of download.ceph.com such as "reef"; empty: Debian's own, 16.2.
ARG CEPH_RELEASE=
ARG CEPH_MIRROR=https://download.ceph.com
COPY deploy/image/ /tmp/image/
RUN sh /tmp/image/sources.sh && rm -r /tmp/image

# The Python libraries, stripped, in the environment that the agent runs in.
FROM sources AS libraries
# A pip configuration file that is mounted into the build: an index of your own.
ARG PIP_CONFIG_FILE=
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv clang llvm libbpf-dev
COPY locks/ /src/locks/
RUN python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/nodeagent \
    && /opt/pip/bin/pip install --no-cache-dir --require-hashes -r /src/locks/build.txt \
    && /opt/pip/bin/pip --python /opt/nodeagent/bin/python install \
        --no-cache-dir --require-hashes -r /src/locks/runtime.txt \
    && find /opt/nodeagent -name '*.so*' -exec strip --strip-unneeded {} +

# The agent itself, below /agent: a layer of its own, the only one that a new version changes.
FROM libraries AS agent
COPY . /src/
RUN cd /src && /opt/pip/bin/pip wheel --no-deps --no-build-isolation --no-index -w /wheel . \
    && /opt/pip/bin/pip --python /opt/nodeagent/bin/python install \
        --no-deps --no-index --no-cache-dir --root /agent /wheel/*.whl

FROM sources
COPY deploy/image/ /tmp/image/
RUN sh /tmp/image/install.sh && rm -r /tmp/image
COPY --from=libraries /opt/nodeagent /opt/nodeagent
RUN for module in rados rbd cephfs; do \
        ln -s /usr/lib/python3/dist-packages/$module.cpython-311-*.so \
            /opt/nodeagent/lib/python3.11/site-packages/; \
    done
COPY --from=agent /agent/ /
ENV PATH=/opt/nodeagent/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="nodeagent" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# The label cannot be read off the agent, so a wrong one fails the build.
RUN test "$(nodeagent --version)" = "nodeagent, version ${VERSION}" \
    && rm -rf /root/.cache /tmp/*
ENTRYPOINT ["/opt/nodeagent/bin/nodeagent"]
CMD ["run"]
