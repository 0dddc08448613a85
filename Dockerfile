# docker build -t ultrascale . && docker run --rm -it ultrascale            trains chapter 1's demo
# docker run --rm -it ultrascale ./book test                               runs the tests
FROM debian:12

# Python starts ./book; git names the commit in a run's record.
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 git \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /ultrascale

# The package table comes before the sources: editing them does not install everything again.
COPY tools tools
RUN apt-get update \
 && apt-get install -y --no-install-recommends $(python3 -m tools.run.packages) \
 && rm -rf /var/lib/apt/lists/*

COPY . .
CMD ["./book", "run"]
