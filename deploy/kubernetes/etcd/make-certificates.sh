#!/bin/sh
# Writes the two secrets that etcd and the jobs need, as manifests: sh make-certificates.sh | kubectl apply -f -
# The authority's key is thrown away, so all of them are made anew together. With cert-manager, let it make secrets of the same names.
set -eu
days=${1:-365}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

new_key() { openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout "$1.key" -subj "/CN=$1" "$2" "$3" 2>/dev/null; }
encoded() { base64 <"$1" | tr -d '\n'; }

openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout ca.key -out ca.crt -days "$days" -subj "/CN=etcd" 2>/dev/null
# A member is a client of the others, so a server's certificate serves both ways.
echo "subjectAltName=DNS:etcd-0.etcd,DNS:etcd-1.etcd,DNS:etcd-2.etcd,DNS:localhost,IP:127.0.0.1" >server.ext
echo "extendedKeyUsage=serverAuth,clientAuth" >>server.ext
echo "extendedKeyUsage=clientAuth" >client.ext
for name in server client; do
  new_key $name -out $name.csr
  openssl x509 -req -in $name.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days "$days" -extfile $name.ext -out $name.crt 2>/dev/null
  cat <<SECRET
apiVersion: v1
kind: Secret
metadata: {name: etcd-$name-tls}
type: kubernetes.io/tls
data:
  ca.crt: $(encoded ca.crt)
  tls.crt: $(encoded $name.crt)
  tls.key: $(encoded $name.key)
---
SECRET
done
