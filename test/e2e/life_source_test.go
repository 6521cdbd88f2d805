package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/test/lab"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// apiServer answers lists and watches of Nodes on the lab's outside host, by HTTP/2.
type apiServer struct {
	*httptest.Server
	on   *lab.Namespace
	list []byte
}

// ServeHTTP implements http.Handler.
func (a *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	switch query := r.URL.Query(); {
	case r.Method != http.MethodGet:
		http.Error(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403}`, http.StatusForbidden)
	case query.Get("sendInitialEvents") != "":
		http.Error(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Invalid","code":422}`, http.StatusUnprocessableEntity)
	case query.Get("watch") != "":
		w.WriteHeader(http.StatusOK)
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	default:
		_, _ = w.Write(a.list)
	}
}

// start listens at an address; port 0 is any.
func (a *apiServer) start(t *testing.T, at netip.AddrPort) {
	t.Helper()
	err := a.on.Do(func() error {
		l, err := net.Listen("tcp", at.String())
		if err != nil {
			return err
		}
		a.Server = httptest.NewUnstartedServer(a)
		_ = a.Server.Listener.Close()
		a.Server.Listener, a.Server.EnableHTTP2, a.Server.Config.ErrorLog = l, true, log.New(io.Discard, "", 0)
		a.StartTLS()
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func (a *apiServer) stop() {
	_ = a.Server.Listener.Close()
	a.CloseClientConnections()
	a.Close()
}

// A node that has lost the API server carries pods as before, and says so to everybody who asks. So does one whose
// listeners' ports somebody else has.
func TestLifeWithoutAPIServer(t *testing.T) {
	t.Parallel()
	l := lab.ForTest(t, lab.Options{Nodes: 1})
	node := l.Nodes[0]
	list, err := lab.NodeListJSON(l.NodeSpecs()...)
	if err != nil {
		t.Fatal(err)
	}
	var content map[string]any
	if err := json.Unmarshal(list, &content); err != nil {
		t.Fatal(err)
	}
	content["kind"], content["metadata"] = "NodeList", map[string]string{"resourceVersion": "1"}
	if list, err = json.Marshal(content); err != nil {
		t.Fatal(err)
	}
	api := &apiServer{on: l.Outside, list: list}
	api.start(t, netip.AddrPortFrom(l.Outside.Addr(), 0))
	defer func() { api.stop() }()
	at := netip.MustParseAddrPort(api.Server.Listener.Addr().String())
	node.Kubeconfig = filepath.Join(l.Dir, "kubeconfig")
	config := fmt.Sprintf(`{"kind": "Config", "apiVersion": "v1", "current-context": "lab",
  "clusters": [{"name": "lab", "cluster": {"server": "https://%s", "insecure-skip-tls-verify": true}}], "contexts": [{"name": "lab", "context": {"cluster": "lab"}}]}`, at)
	if err := os.WriteFile(node.Kubeconfig, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}

	var taken net.Listener
	if err := node.Do(func() (err error) { taken, err = net.Listen("tcp4", "127.0.0.1:9965"); return err }); err != nil {
		t.Fatal(err)
	}
	if err := node.StartAgent(); err != nil {
		t.Fatal(err)
	}
	eventually(t, readyLimit, "the list is written although a port is taken", func() bool { _, err := os.Stat(node.Conflist()); return err == nil })
	first := addPod(t, node, "first")
	assertReaches(t, first.Namespace, serve(t, l.Outside), node.Addr())
	assertStatus(t, node, changeLimit, "degraded, listeners/--listen", "address already in use")
	_ = taken.Close()
	if err := node.WaitReady(within(t, readyLimit)); err != nil {
		t.Fatal(err)
	}
	assertNoProblems(t, node)

	connected := func(is string) func() bool {
		return func() bool { return strings.Contains(metrics(t, node), "\nebpf_cni_source_connected "+is+"\n") }
	}
	eventually(t, changeLimit, "connected", connected("1"))
	lose := func(how string, within time.Duration, happen func()) {
		size := len(node.LogTail(1 << 20))
		happen()
		eventually(t, within, how+": the loss is noticed", connected("0"))
		assertStatus(t, node, changeLimit, "\n- degraded since ", "source/Nodes: they can't be read, and what was known of them stays in force: ", "running, ready, degraded: source\n")
		if !strings.Contains(metrics(t, node), "\nebpf_cni_degraded{controller=\"source\"} 1\n") {
			t.Errorf("%s: the metric does not say that the node is degraded", how)
		}
		if said := node.LogTail(1 << 20)[size:]; strings.Count(said, "Nodes can't be read") != 1 {
			t.Errorf("%s: logged %s", how, said)
		}
		if status, body, err := node.HTTPGet(t.Context(), "/readyz"); err != nil || status != 200 {
			t.Errorf("%s: /readyz answers %d %s, error %v", how, status, body, err)
		}
		pod := addPod(t, node, "during-"+how)
		assertReaches(t, pod.Namespace, serve(t, first.Namespace), pod.Addr())
	}
	back := func(how string, within time.Duration) {
		eventually(t, within, how+": the return is noticed", connected("1"))
		if said := node.LogTail(1 << 20); !strings.Contains(said, "Nodes can be read again") {
			t.Errorf("%s: logged %s", how, said)
		}
		assertNoProblems(t, node)
	}
	lose("refused", 10*time.Second, api.stop)
	api.start(t, at)
	back("refused", 30*time.Second)
	if !priv.Long() {
		return
	}
	// Packets vanish on the way: nobody refuses anything.
	hole := &netlink.Route{Dst: netlink.NewIPNet(net.IP(node.Addr().AsSlice())), Type: unix.RTN_BLACKHOLE}
	lose("swallowed", 2*time.Minute, func() {
		if err := l.Outside.Netlink().RouteAdd(hole); err != nil {
			t.Fatal(err)
		}
	})
	if err := l.Outside.Netlink().RouteDel(hole); err != nil {
		t.Fatal(err)
	}
	back("swallowed", time.Minute)
}

// assertStatus waits until ebpfctl status says all of it.
func assertStatus(t *testing.T, node *lab.Node, limit time.Duration, words ...string) {
	t.Helper()
	var out []byte
	eventually(t, limit, fmt.Sprintf("ebpfctl status says %q", words), func() bool {
		out, _ = node.Ebpfctl(t.Context(), "status")
		return !slices.ContainsFunc(words, func(word string) bool { return !bytes.Contains(out, []byte(word)) })
	})
	if t.Failed() {
		t.Logf("%s", out)
	}
}

func assertNoProblems(t *testing.T, node *lab.Node) {
	t.Helper()
	assertStatus(t, node, changeLimit, "agent      running, ready\n", "No problems.")
}
