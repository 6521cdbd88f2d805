package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/gopacket/gopacket/layers"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/observe"
	"github.com/ebpf-cni/ebpf-cni/test/lab"
)

const (
	unixAFInet    = unix.AF_INET
	routeProtocol = 142 // of our own routes
)

// metrics is what Prometheus gets.
func metrics(t *testing.T, node *lab.Node) string {
	t.Helper()
	status, body, err := node.HTTPGet(t.Context(), "/metrics")
	if err != nil || status != 200 {
		t.Fatalf("/metrics answers %d, error %v", status, err)
	}
	return string(body)
}

// Everything that the agent tells of itself, in one life of an agent: why it is not ready, that it is, what it counts, and
// that a second one can't join it.
func TestLifeHealthAndMetrics(t *testing.T) {
	t.Parallel()
	l := lab.ForTest(t, lab.Options{Nodes: 2})
	node := l.Nodes[0]
	specs := l.NodeSpecs()
	if err := l.WriteNodes(specs[1]); err != nil {
		t.Fatal(err)
	}
	const scrape = "0.0.0.0:9100"
	for i, n := range l.Nodes {
		flags := [][]string{{"--metrics-listen=" + scrape}, {"--listen=0.0.0.0:9965"}}[i]
		if err := n.StartAgent(flags...); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.Nodes[1].WaitReady(within(t, readyLimit)); err != nil {
		t.Fatal(err)
	}
	assertNotReady(t, node, "no Node "+node.Name+" in the list")
	if err := l.WriteNodes(specs...); err != nil {
		t.Fatal(err)
	}
	if err := node.WaitReady(within(t, readyLimit)); err != nil {
		t.Fatal(err)
	}
	if status, body, err := node.HTTPGet(t.Context(), "/healthz"); err != nil || status != 200 {
		t.Errorf("/healthz answers %d %s, error %v", status, body, err)
	}
	pod, far := addPod(t, node, "a"), addPod(t, l.Nodes[1], "far")
	assertReaches(t, pod.Namespace, serve(t, far.Namespace), pod.Addr())
	assertReaches(t, pod.Namespace, serve(t, l.Outside), node.Addr())

	t.Run("metrics", func(t *testing.T) { assertMetrics(t, node) })
	t.Run("listeners", func(t *testing.T) {
		needIPv4(t, l)
		assertListeners(t, node, pod)
		// One that listens on every address is for the node's own processes and for other hosts.
		open := l.Nodes[1]
		url := "http://" + open.Addr().String() + ":9965/healthz"
		for from, may := range map[*lab.Namespace]bool{far.Namespace: false, pod.Namespace: false, open.Namespace: true, node.Namespace: true, l.Outside: true} {
			limit := standstill
			if may {
				limit = answerLimit
			}
			if status, err := httpStatus(t, from, url, limit); may != (err == nil && status == 200) {
				t.Errorf("%s asks an agent that listens on 0.0.0.0: status %d, error %v", from.Netns(), status, err)
			}
		}
	})
	t.Run("second agent", func(t *testing.T) { assertSecondAgentRefuses(t, node) })
	t.Run("stopped", func(t *testing.T) { assertStoppedIsTold(t, node) })
}

// assertStoppedIsTold: an agent that is stopped has its lock, but ebpfctl knows when it last went round.
func assertStoppedIsTold(t *testing.T, node *lab.Node) {
	signal := func(s unix.Signal) {
		t.Helper()
		if err := unix.Kill(node.AgentPID(), s); err != nil {
			t.Fatal(err)
		}
	}
	signal(unix.SIGSTOP)
	defer signal(unix.SIGCONT)
	long := time.Now().Add(-2 * observe.MaxSilence) // as if it had been so for long
	if err := os.Chtimes(filepath.Join(node.StateDir(), observe.ClusterFile), long, long); err != nil {
		t.Fatal(err)
	}
	out, err := node.Ebpfctl(t.Context(), "status")
	if err == nil || !strings.Contains(string(out), "running, stuck") || !strings.Contains(string(out), "restart it") {
		t.Errorf("ebpfctl status of a stopped agent: %v\n%s", err, out)
	}
	signal(unix.SIGCONT)
	eventually(t, entryPromise, "ebpfctl status finds the agent at work", func() bool {
		out, err = node.Ebpfctl(t.Context(), "status")
		return err == nil && strings.Contains(string(out), "running, ready")
	})
}

// assertNotReady waits until the agent says why it is not ready; then there is no list for the runtime.
func assertNotReady(t *testing.T, node *lab.Node, why string) {
	t.Helper()
	var said string
	eventually(t, readyLimit, "/readyz says "+why, func() bool {
		status, body, err := node.HTTPGet(t.Context(), "/readyz")
		said = string(body)
		return err == nil && status == 503 && strings.Contains(said, why)
	})
	if t.Failed() {
		t.Fatalf("/readyz says %q", said)
	}
	if _, err := os.Stat(node.Conflist()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("not ready, and the list is there (error %v)", err)
	}
	if status, _, err := node.HTTPGet(t.Context(), "/healthz"); err != nil || status != 200 {
		t.Errorf("not ready: /healthz answers %d, want 200; error %v", status, err)
	}
}

// assertMetrics: every name is there, with its labels, and those that must have counted have.
func assertMetrics(t *testing.T, node *lab.Node) {
	eventually(t, answerLimit, "the agent has looked for what vanishes without a notice", func() bool {
		return !strings.Contains(metrics(t, node), `ebpf_cni_pass_duration_seconds_count{kind="inspect"} 0`)
	})
	text := metrics(t, node)
	samples := map[string]string{}
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), " "); ok && name != "#" {
			samples[name] = value
		}
	}
	family := fmt.Sprintf("family=%q", wire.FamilyOf(node.PodCIDR().Addr()))
	for name, counted := range map[string]bool{
		`map_entries{map="endpoints"}`: true, `map_capacity{map="snat"}`: true, `map_entries{map="snat"}`: true,
		`drops_total{reason="SPOOFED_SOURCE"}`: false, `drops_total{reason="SNAT_EXHAUSTED"}`: false,
		`packets_total{direction="from_pod"}`: true, `packets_total{direction="from_uplink"}`: true, `packets_total{direction="to_uplink"}`: true,
		`bytes_total{direction="from_pod"}`: true, `snat_allocations_total`: true, `snat_retries_total`: false, `snat_failures_total`: false,
		`sync_lag_seconds`: true, `nodes`: true, `endpoints`: true,
		`addresses{` + family + `,state="used"}`: true, `addresses{` + family + `,state="free"}`: true, `addresses{` + family + `,state="quarantined"}`: false,
		`pass_duration_seconds_count{kind="pass"}`: true, `pass_duration_seconds_count{kind="inspect"}`: true,
		`repairs_total{what="pin"}`: false, `repairs_total{what="route"}`: false, `lock_wait_seconds_count{work="start"}`: true,
		`node_problems{reason="off_link"}`: false,
	} {
		value, there := samples["ebpf_cni_"+name]
		if !there {
			t.Errorf("there is no ebpf_cni_%s", name)
		} else if counted == (value == "0") {
			t.Errorf("ebpf_cni_%s is %s", name, value)
		}
	}
	if samples["ebpf_cni_nodes"] != "2" || samples["ebpf_cni_endpoints"] != "1" {
		t.Errorf("%s nodes and %s endpoints, want 2 and 1", samples["ebpf_cni_nodes"], samples["ebpf_cni_endpoints"])
	}
	// TestLifeNodesChange makes problems with Nodes.
}

// assertListeners: pods reach the listener for Prometheus, which has nothing but metrics, and never the other.
func assertListeners(t *testing.T, node *lab.Node, pod *lab.Pod) {
	for _, host := range []string{node.Addr().String(), "169.254.1.1"} {
		if status, err := httpStatus(t, pod.Namespace, "http://"+host+":9965/healthz", standstill); err == nil {
			t.Errorf("a pod reaches the agent's listener at %s: status %d", host, status)
		}
	}
	for path, want := range map[string]int{"/metrics": 200, "/readyz": 404} {
		if status, err := httpStatus(t, pod.Namespace, "http://"+node.Addr().String()+":9100"+path, answerLimit); status != want {
			t.Errorf("--metrics-listen: %s answers a pod with %d, want %d; error %v", path, status, want, err)
		}
	}
	if answer := loopbackRequest(t, node, pod); answer != "" {
		t.Errorf("the agent's listener answers a pod that writes to 127.0.0.1: %s", answer)
	}
}

// loopbackRequest asks the listener on the node's loopback address, as a pod can that writes its own frames, while packets
// to 127.0.0.1 may come in from outside (kube-proxy sees to that). It returns what the listener says.
func loopbackRequest(t *testing.T, node *lab.Node, pod *lab.Pod) (answer string) {
	t.Helper()
	const setting = "net/ipv4/conf/all/route_localnet"
	if err := node.WriteSysctl(setting, "1"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := node.WriteSysctl(setting, "0"); err != nil {
			t.Error(err)
		}
	}()
	capture, err := pod.Capture(pod.IfName)
	if err != nil {
		t.Fatal(err)
	}
	var accepted *layers.TCP
	sendLoopback(t, pod, &layers.TCP{Seq: 1, SYN: true}, "")
	eventually(t, answerLimit, "the node answers the SYN", func() bool {
		for _, packet := range capture.Packets() {
			if tcp, ok := packet.TransportLayer().(*layers.TCP); ok && tcp.SrcPort == agentPort && tcp.SYN && tcp.ACK {
				accepted = tcp
			}
		}
		return accepted != nil
	})
	if accepted == nil {
		return ""
	}
	sendLoopback(t, pod, &layers.TCP{Seq: 2, Ack: accepted.Seq + 1, ACK: true, PSH: true}, "GET /metrics HTTP/1.0\r\n\r\n")
	ended := func() bool {
		for _, packet := range capture.Packets() {
			if tcp, ok := packet.TransportLayer().(*layers.TCP); ok && tcp.SrcPort == agentPort {
				answer += string(tcp.Payload)
				if tcp.FIN || tcp.RST {
					return true
				}
			}
		}
		return false
	}
	eventually(t, answerLimit, "the agent closes the connection", ended)
	capture.Close()
	return answer
}

const agentPort = 9965

// sendLoopback sends a segment to the agent's port of 127.0.0.1 out of the pod.
func sendLoopback(t *testing.T, pod *lab.Pod, tcp *layers.TCP, payload string) {
	t.Helper()
	tcp.SrcPort, tcp.DstPort, tcp.Window = 40000, agentPort, 65535
	frame := frameOf(t, pod, netip.MustParseAddr("127.0.0.1"), tcp, []byte(payload))
	if err := pod.SendFrame(pod.IfName, frame); err != nil {
		t.Fatal(err)
	}
}

// httpStatus is what somebody gets from a web server within a limit.
func httpStatus(t *testing.T, from *lab.Namespace, url string, limit time.Duration) (int, error) {
	t.Helper()
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, network, addr string) (conn net.Conn, err error) {
		err = from.Do(func() (err error) {
			conn, err = new(net.Dialer).DialContext(ctx, network, addr)
			return err
		})
		return conn, err
	}}
	request, err := http.NewRequestWithContext(within(t, limit), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := transport.RoundTrip(request)
	if err != nil {
		return 0, err
	}
	return response.StatusCode, response.Body.Close()
}

// assertSecondAgentRefuses: with status 1 and a sentence, and without having touched anything.
func assertSecondAgentRefuses(t *testing.T, node *lab.Node) {
	path, err := node.AgentPath()
	if err != nil {
		t.Fatal(err)
	}
	before, was := inventory(t, node), objects(t, node)
	for name, flags := range map[string][]string{
		"the same directories": nil,
		"the same pins":        {"--state-dir=" + t.TempDir()},
	} {
		_, err := node.Exec(within(t, 5*time.Second), path, node.AgentArgs(append(flags, "--listen=127.0.0.1:9999")...)...)
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != 1 || !strings.Contains(err.Error(), "an agent is running") {
			t.Errorf("a second agent on %s: %v, want exit status 1 and why", name, err)
		}
		if diff := cmp.Diff(before, inventory(t, node)); diff != "" {
			t.Errorf("a second agent on %s has changed the node:\n%s", name, diff)
		}
		if diff := cmp.Diff(was, objects(t, node)); diff != "" {
			t.Errorf("a second agent on %s has changed the dataplane:\n%s", name, diff)
		}
	}
	if !node.AgentRunning() {
		t.Error("the first agent has ended")
	}
}
