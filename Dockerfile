# A server without root and with a read-only root file system: only /data is written to.
#   docker build -t headrace .
#   docker run --read-only --tmpfs /tmp -v headrace:/data -p 127.0.0.1:8119-8121:8119-8121 headrace

FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
# Extras of the server, such as --build-arg EXTRAS=postgres; jobs on Spark run elsewhere.
ARG EXTRAS=postgres,jwt
RUN python -m venv /opt/headrace \
    && /opt/headrace/bin/pip install --no-cache-dir -c constraints.txt setuptools \
    && /opt/headrace/bin/pip install --no-cache-dir --no-build-isolation -c constraints.txt ".[${EXTRAS}]" \
    && /opt/headrace/bin/headrace man --to /opt/headrace/share/man/man1

FROM python:3.12-slim
RUN groupadd --gid 10001 headrace \
    && useradd --uid 10001 --gid headrace --home-dir /data --no-create-home --no-log-init --shell /usr/sbin/nologin headrace \
    && install -d -o headrace -g headrace -m 0750 /data
COPY --from=build /opt/headrace /opt/headrace
ENV PATH=/opt/headrace/bin:$PATH PYTHONDONTWRITEBYTECODE=1 HEADRACE_DATA_DIR=/data
USER 10001:10001
WORKDIR /data
VOLUME /data
EXPOSE 8119 8120 8121
# A stop waits until all publishes are stored.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["headrace", "status", "--health"]
ENTRYPOINT ["headrace"]
CMD ["serve", "--figg", "0.0.0.0:8119", "--ws", "0.0.0.0:8120", "--http", "0.0.0.0:8121", "--log-format", "json"]
