# The server in a container. Build: docker build -t refimpl . Run: docker run --gpus all -p 127.0.0.1:8000:8000 refimpl MODEL
FROM python:3.12-slim

# Triton compiles its launchers with a C compiler when a kernel is first used.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /app
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY kernels kernels
COPY visualizers visualizers
COPY notebooks notebooks
COPY refimpl refimpl

# torch as PyPI has it, for GPUs; another build: --build-arg TORCH=torch==2.13.0
ARG TORCH=torch
RUN pip install --no-cache-dir "${TORCH}" ".[server]"

# Downloaded models are kept in a volume.
RUN useradd --create-home refimpl && mkdir /models && chown refimpl /models
ENV HF_HOME=/models REFIMPL_CACHE=/models/refimpl
VOLUME /models
USER refimpl
WORKDIR /home/refimpl

EXPOSE 8000
HEALTHCHECK --start-period=10m CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=5)"]

# Within a container all interfaces are the container's own: who may come in is said by the ports that docker run publishes.
ENTRYPOINT ["refimpl", "serve", "--host", "0.0.0.0"]
CMD ["smollm2"]
