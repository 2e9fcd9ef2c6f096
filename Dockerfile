# Atoll with CPU PyTorch:
#   docker build -t atoll .
#   docker run --rm -v "$PWD/runs:/work/runs" atoll train digits-at
FROM python:3.12-slim

WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
COPY papers papers
RUN pip install --no-cache-dir --constraint constraints.txt --index-url https://download.pytorch.org/whl/cpu torch \
    && pip install --no-cache-dir --constraint constraints.txt '.[report,export,pandas]' \
    && pip install --no-cache-dir --no-deps ./papers

WORKDIR /work
ENTRYPOINT ["atoll"]
CMD ["--help"]
