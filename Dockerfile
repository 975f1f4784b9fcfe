# Debian, because the agent uses its Ceph client and bindings (built for this Python).
FROM debian:bookworm-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv python3-pip \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY locks/runtime.txt locks/
RUN python3 -m venv /opt/nodeagent && /opt/nodeagent/bin/pip install --no-cache-dir --require-hashes -r locks/runtime.txt
COPY . .
RUN /opt/nodeagent/bin/pip install --no-cache-dir --no-deps .

FROM debian:bookworm-slim
# ceph-common: rados (the client's version for ceph-version-skew); rbd-nbd: unmapping its orphans;
# systemd: journalctl, nothing of it runs here.
RUN apt-get update && apt-get install -y --no-install-recommends \
        python3 ceph-fuse ceph-common libcephfs2 python3-rados python3-rbd python3-cephfs kmod \
        rbd-nbd systemd \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/nodeagent /opt/nodeagent
RUN for module in rados rbd cephfs; do \
        ln -s /usr/lib/python3/dist-packages/$module.cpython-311-*.so \
            /opt/nodeagent/lib/python3.11/site-packages/; \
    done
ENTRYPOINT ["/opt/nodeagent/bin/nodeagent"]
CMD ["run"]
