"""Jobs of Kubernetes in real containers, without a cluster: podman runs the pods, ``jobs`` plays the Job controller and the kubelet."""
