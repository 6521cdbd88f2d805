package agent

import (
	"testing"

	"k8s.io/client-go/rest"
)

func TestAPIServerAddress(t *testing.T) {
	for host, want := range map[string]string{
		"https://192.0.2.1:6443": "192.0.2.1:6443", "https://[2001:db8::1]:6443": "[2001:db8::1]:6443", "https://192.0.2.1": "192.0.2.1:443",
		"https://api.example:6443": "invalid AddrPort", ":": "invalid AddrPort",
	} {
		if got := (Config{API: &rest.Config{Host: host}}).apiServer().String(); got != want {
			t.Errorf("%s: %s, want %s", host, got, want)
		}
	}
	if got := (Config{}).apiServer(); got.IsValid() {
		t.Errorf("without an API: %v", got)
	}
}
