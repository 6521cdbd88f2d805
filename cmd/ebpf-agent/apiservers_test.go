package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Addresses of API servers beside the configuration that has the credentials.
func TestAPIServers(t *testing.T) {
	dir := t.TempDir()
	kubeconfig := func(server string) string {
		path := filepath.Join(dir, "kubeconfig")
		content := "{apiVersion: v1, kind: Config, current-context: a, contexts: [{name: a, context: {cluster: a}}], clusters: [{name: a, cluster: {server: \"" + server + "\"}}]}"
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return "--kubeconfig=" + path
	}
	c := call(t, nil, nil, kubeconfig("https://192.0.2.1:6443"), "--api-server=https://192.0.2.2:6443", "--services=on")
	if c.status != 0 || !slices.Equal(c.config.APIServers, []string{"https://192.0.2.2:6443"}) || c.config.APIOfService {
		t.Errorf("status %d, %+v, %s", c.status, c.config, c.stderr)
	}
	c = call(t, nil, nil, kubeconfig("https://192.0.2.1:6443"), "--api-server=http://192.0.2.2:6443")
	if c.status != 2 || !strings.HasPrefix(c.stderr, "ebpf-agent: --api-server ") || strings.Count(c.stderr, "\n") != 1 {
		t.Errorf("http beside https: status %d, %s", c.status, c.stderr)
	}
	if c := call(t, nil, nil, kubeconfig("http://192.0.2.1:6443"), "--api-server=http://192.0.2.2:6443"); c.status != 0 {
		t.Errorf("http beside http: status %d, %s", c.status, c.stderr)
	}
	c = call(t, nil, map[string]string{"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_PORT": "tcp://10.96.0.1:443"}, kubeconfig("https://192.0.2.1:6443"),
		"--api-server=https://10.96.0.1", "--services=on")
	if c.status != 2 || !strings.HasPrefix(c.stderr, "ebpf-agent: --api-server ") || !strings.Contains(c.stderr, "Service's address") {
		t.Errorf("a Service's address: status %d, %s", c.status, c.stderr)
	}
	for service, port := range map[string]string{"10.96.0.1": "tcp://10.96.0.1:443", "fd00::1": "tcp://[fd00::1]:443", "10.96.0.2": ""} {
		e := env{lookup: func(string) (string, bool) { return port, port != "" }}
		if !e.isService(service) || port != "" && e.isService("192.0.2.1") {
			t.Errorf("%s of %q is not told apart from another address", service, port)
		}
	}
}
