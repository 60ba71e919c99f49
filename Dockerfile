# The image of workers, exporter and scaler, for linux/amd64. deploy/README.md goes through it step by
# step and says what each should print. `make image-test` builds it, with stand-ins for what it fetches.
#
#   docker build -t leanq:0.1.0 .
#   docker build -t leanq-mathlib:0.1.0 \
#     --build-arg PROJECT_GIT=https://github.com/leanprover-community/mathlib4 \
#     --build-arg PROJECT_REV=v4.35.0 .

# One toolchain: Lean and a project have to be of the same version.
ARG LEAN_VERSION=v4.35.0

# 1. Lean, fetched by elan. elan itself is checked by its hash, and stays in this stage.
FROM debian:12.11-slim AS lean
ARG LEAN_VERSION
ARG ELAN_VERSION=v4.2.4
ARG ELAN_SHA256=42b94d4244e8353142c456ec0e4ca6528fd898a6c604d4059f494e706e431f63
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates curl git \
 && rm -rf /var/lib/apt/lists/*
RUN curl --proto '=https' --tlsv1.2 -fsSL -o /tmp/elan.tar.gz \
      "https://github.com/leanprover/elan/releases/download/${ELAN_VERSION}/elan-x86_64-unknown-linux-gnu.tar.gz" \
 && echo "${ELAN_SHA256}  /tmp/elan.tar.gz" | sha256sum -c - \
 && tar -xzf /tmp/elan.tar.gz -C /tmp \
 && ELAN_HOME=/opt/elan /tmp/elan-init -y --no-modify-path \
      --default-toolchain "leanprover/lean4:${LEAN_VERSION}" \
 # Out of elan's hands: its proxies choose a toolchain by the working folder and can download one.
 # The same path in every stage, since programs may remember where their libraries were.
 && mv /opt/elan/toolchains/* /opt/lean \
 && rm -rf /opt/elan /tmp/elan*
ENV PATH=/opt/lean/bin:$PATH
RUN lean --version

# 2. A Lake project to offer, if one is named: its compiled modules and those of its packages, in one
# folder. Neither lake nor git is needed for that at run time. Without a project the folder is empty.
FROM lean AS project
ARG PROJECT_GIT=""
ARG PROJECT_REV=""
ARG PROJECT_CACHE=""
ARG PROJECT_MODULES=""
WORKDIR /src/project
COPY deploy/lake-project /usr/local/bin/
RUN mkdir /srv/lean \
 && if [ -n "${PROJECT_GIT}" ]; then lake-project "${PROJECT_GIT}" "${PROJECT_REV}" /srv/lean; fi

# 3. The toolchain without its compiler of C, linker, headers and static libraries: nothing at run
# time needs them, and candidates shall not have them.
FROM lean AS toolchain
RUN cd /opt/lean \
 && rm -rf bin/clang* bin/ld.lld bin/llvm-ar bin/leanc bin/leanmake include lib/clang lib/glibc \
 && find lib -name '*.a' -delete \
 && printf 'theorem t : 2 + 2 = 4 := rfl\n' | bin/lean --stdin

# 4. leanq, from the sources beside this file.
FROM python:3.12.11-slim-bookworm AS leanq
WORKDIR /src/leanq
COPY pyproject.toml README.md LICENSE ./
COPY leanq ./leanq
# What `leanq --version` says. Git's tag is not among these sources.
ARG LEANQ_VERSION=""
RUN python -m venv /opt/leanq \
 && SETUPTOOLS_SCM_PRETEND_VERSION_FOR_LEANQ="${LEANQ_VERSION}" \
    /opt/leanq/bin/pip install --no-cache-dir '.[judge,k8s,campaigns,server]'

# 5. What runs.
FROM python:3.12.11-slim-bookworm
# As process 1, tini passes SIGTERM on and buries what the sandboxes leave to it.
RUN apt-get update \
 && apt-get install -y --no-install-recommends tini \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin leanq \
 # No program here is to raise its caller's rights.
 && find / -xdev -type f -perm /6000 -exec chmod a-s {} + \
 # A volume that is mounted here takes over the owner.
 && install -d -o leanq -g leanq /var/cache/leanq /var/lib/leanq
COPY --from=toolchain /opt/lean /opt/lean
COPY --from=project /srv/lean /srv/lean
COPY --from=leanq /opt/leanq /opt/leanq
# Or each new pod would read all modules before it serves; from their last place, where times are as noted.
RUN /opt/leanq/bin/python -m leanq.lean.run.baked_hashes /srv/lean
ENV PATH=/opt/leanq/bin:/opt/lean/bin:$PATH \
    LEANQ_LEAN=/opt/lean/bin/lean \
    LEANQ_CACHE=/var/cache/leanq \
    PYTHONUNBUFFERED=1
# A number, so that Kubernetes can see for itself that it is not root.
USER 10001:10001
WORKDIR /
ENTRYPOINT ["tini", "--", "leanq"]
CMD ["worker", "--json"]
