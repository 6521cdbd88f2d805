package agent

import (
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Docker's unit may start when the node is ready, and no earlier.
func TestServiceManagerHearsOfReadiness(t *testing.T) {
	for _, name := range []string{filepath.Join(t.TempDir(), "notify"), "@ebpf-cni-test-" + filepath.Base(t.TempDir())} {
		manager, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: name, Net: "unixgram"})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { manager.Close() })
		var log strings.Builder
		s := newStatus(slog.New(slog.NewTextHandler(&log, nil)))
		s.notify = name
		s.setNotReady("no Nodes yet")
		s.setNotReady("")

		got := make([]byte, 100)
		if err := manager.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
			t.Fatal(err)
		}
		n, err := manager.Read(got)
		if string(got[:n]) != "READY=1" || err != nil {
			t.Errorf("%s: it hears %q, %v; want READY=1", name, got[:n], err)
		}
		s.setNotReady("")
		if err := manager.SetReadDeadline(time.Now().Add(10 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		if n, err := manager.Read(got); err == nil {
			t.Errorf("%s: told again what it knows: %q", name, got[:n])
		}
		manager.Close()
		s.setNotReady("again")
		s.setNotReady("")
		if !strings.Contains(log.String(), "tell the service manager") || !s.isReady() {
			t.Errorf("%s: a manager that is gone is not said, or keeps the node from being ready:\n%s", name, &log)
		}
	}
}
