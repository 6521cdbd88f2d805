package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ebpf-cni/ebpf-cni/test/cluster"
)

// sees checks that a server sees a client's address, and which that is.
func sees(t *testing.T, from dialer, to string, want netip.Addr) {
	t.Helper()
	seesTCP(t, to, from, to, want)
}

func seesTCP(t *testing.T, what string, from dialer, to string, want netip.Addr) {
	t.Helper()
	got, err := ask(t.Context(), from, to, "/clientip")
	isClient(t, what+" over TCP", got, err, want)
}

func seesUDP(t *testing.T, what string, from dialer, to string, want netip.Addr) {
	t.Helper()
	got, err := askUDP(within(t, answerLimit), from, to, "clientip")
	isClient(t, what+" over UDP", got, err, want)
}

// isClient checks what a server said of the client's address.
func isClient(t *testing.T, what, got string, err error, want netip.Addr) {
	t.Helper()
	if err != nil {
		t.Errorf("%s: %v", what, err)
		return
	}
	if client, err := netip.ParseAddrPort(strings.TrimSpace(got)); err != nil || client.Addr() != want {
		t.Errorf("%s: the client is seen as %q, want %s", what, got, want)
	}
}

func TestPods(t *testing.T) { inEachFamily(t, running(t), pods) }

func pods(t *testing.T, s *standing) {
	t.Helper()
	sees(t, s.client, at(s.near.Addr, cluster.HTTPPort), s.client.Addr)
	sees(t, s.client, at(s.far.Addr, cluster.HTTPPort), s.client.Addr)
	sees(t, s.far, at(s.client.Addr, cluster.HTTPPort), s.far.Addr)
	for _, to := range []*cluster.Pod{s.near, s.far} {
		if out, err := s.client.Run(within(t, answerLimit), "ping", "-c2", "-i0.1", "-W2", to.Addr.String()); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
	}
}

func TestPodsAndNodes(t *testing.T) { inEachFamily(t, running(t), podsAndNodes) }

func podsAndNodes(t *testing.T, s *standing) {
	t.Helper()
	for _, node := range s.Nodes {
		sees(t, node, at(s.near.Addr, cluster.HTTPPort), node.Addr)
		// The kubelet's port: that it answers at all is what counts.
		conn, err := s.client.Dial(within(t, answerLimit), "tcp", at(node.Addr, 10250))
		if err != nil {
			t.Errorf("pod to %s: %v", node.Name, err)
			continue
		}
		conn.Close()
	}
}

func TestWorldSeesTheNode(t *testing.T) { inEachFamily(t, running(t), worldSeesTheNode) }

func worldSeesTheNode(t *testing.T, s *standing) {
	t.Helper()
	sees(t, s.client, at(s.World(), cluster.HTTPPort), s.client.Node.Addr)
	sees(t, s.far, at(s.World(), cluster.HTTPPort), s.far.Node.Addr)
}

// The kubelet of each node execs in pods and reads their logs, over the API server. The runtime says that a container runs before all
// that it prints is in its log.
func TestExecAndLogs(t *testing.T) {
	s := running(t)
	for _, pod := range []*cluster.Pod{s.client, s.far} {
		out, err := s.Kubectl(within(t, stepLimit), "exec", pod.Name, "--", "/agnhost", "--version")
		if err != nil || !strings.Contains(out, "version") {
			t.Errorf("%s runs a program that says %q: %v", pod.Name, out, err)
		}
		// The kubelet turns over logs of 10 MiB, which the other tests' traffic fills: what is looked for has to be new.
		err = cluster.Poll(within(t, stepLimit), "what "+pod.Name+" prints is in its log", func(ctx context.Context) error {
			message := "printed-" + strconv.FormatInt(time.Now().UnixNano(), 10)
			if _, err := ask(ctx, s.near, at(pod.Addr, cluster.HTTPPort), "/echo?msg="+message); err != nil {
				return err
			}
			out, err := s.Kubectl(ctx, "logs", "--tail=100", pod.Name)
			if err == nil && !strings.Contains(out, message) {
				err = fmt.Errorf("%q is not in %q", message, out)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
}

func TestFirstPacket(t *testing.T) {
	s := running(t)
	greetings, err := s.Greet()
	if err != nil {
		t.Fatal(err)
	}
	defer greetings.Close()
	for _, node := range s.Nodes {
		name := "greeter-" + node.Name
		departs(t, s, name)
		took, err := greetings.FirstPacket(t.Context(), node, name, nil)
		if err != nil {
			t.Error(err)
		}
		t.Logf("%s: the first packet arrived %v after the pod was created", node.Name, took.Round(time.Millisecond))
	}
}
