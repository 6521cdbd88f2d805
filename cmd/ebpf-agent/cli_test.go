package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/cmd/internal/cli"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/agent"
)

// comparePrefixes: netip types compare by value.
var comparePrefixes = cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })

// called is what a command line came to.
type called struct {
	status         int
	stdout, stderr string
	config         *agent.Config
	cleaned        *agent.Directories
	ofKubeProxy    bool // it was kube-proxy's that was cleaned up
	forced         bool
}

// call runs a command line in a world with these variables and a nodes file at
// $NODES; agents and cleanups end with result.
func call(t *testing.T, result error, variables map[string]string, args ...string) called {
	t.Helper()
	nodes := filepath.Join(t.TempDir(), "nodes.yaml")
	if err := os.WriteFile(nodes, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	var c called
	var stdout, stderr bytes.Buffer
	e := env{
		stdout: &stdout, stderr: &stderr,
		lookup:     func(name string) (string, bool) { v, ok := variables[name]; return v, ok },
		hostname:   func() (string, error) { return "Host-Name", nil },
		executable: func() (string, error) { return "/image/ebpf-agent", nil },
		findCgroup: func() (string, error) { return "/found", nil },
		run: func(_ context.Context, cfg agent.Config) error {
			c.config = &cfg
			return result
		},
		cleanup: func(_ context.Context, d agent.Directories, _ *slog.Logger) error {
			c.cleaned = &d
			return result
		},
		cleanKubeProxy: func(_ context.Context, d agent.Directories, force bool, out io.Writer) error {
			c.ofKubeProxy, c.forced, c.cleaned = true, force, &d
			_, _ = fmt.Fprintln(out, "removed something")
			return result
		},
	}
	for _, a := range args {
		e.args = append(e.args, strings.ReplaceAll(a, "$NODES", nodes))
	}
	c.status = run(t.Context(), e)
	c.stdout, c.stderr = stdout.String(), stderr.String()
	return c
}

func TestCleanupStays(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	ended, cleaned := make(chan int, 1), make(chan struct{})
	e := env{
		stdout: io.Discard, stderr: io.Discard, args: []string{"cleanup", "--stay"},
		lookup:     func(string) (string, bool) { return "", false },
		executable: func() (string, error) { return "/image/ebpf-agent", nil },
		cleanup:    func(context.Context, agent.Directories, *slog.Logger) error { close(cleaned); return nil },
	}
	go func() { ended <- run(ctx, e) }()
	<-cleaned
	select {
	case status := <-ended:
		t.Errorf("it ended by itself, status %d", status)
	case <-time.After(100 * time.Millisecond):
		cancel()
		if status := <-ended; status != cli.Fine {
			t.Errorf("status %d", status)
		}
	}
	cancel()
	if c := call(t, errors.New("in use"), nil, "cleanup", "--stay"); c.status != cli.Failed {
		t.Errorf("a cleanup that failed: status %d", c.status)
	}
}

func TestDefaults(t *testing.T) {
	c := call(t, nil, nil, "--nodes-file=$NODES")
	if c.status != 0 || c.config == nil {
		t.Fatalf("status %d: %s", c.status, c.stderr)
	}
	got := *c.config
	if !strings.HasSuffix(got.NodesFile, "nodes.yaml") || got.Log == nil {
		t.Errorf("nodes file %q, log %v", got.NodesFile, got.Log)
	}
	got.NodesFile, got.Log = "", nil
	want := agent.Config{
		Directories: agent.Directories{
			BPFFS: "/sys/fs/bpf/ebpf-cni", State: "/run/ebpf-cni", Conf: "/etc/cni/net.d", Bin: "/opt/cni/bin",
			ProcSys: "/proc/sys", Plugin: "/image/ebpf-cni",
		},
		Node: "host-name", RoutingMode: agent.RouteAuto, VXLANPort: 4789, VXLANVNI: 4096, VXLANChecksum: true, Services: agent.ServicesAuto, ExternalIPs: true, Cgroup: "/found", Masquerade: [wire.Families]bool{true, true}, KubeProxy: agent.KubeProxyAuto, ForwardAccept: agent.ForwardAcceptAuto, SnatEntries: 262144,
		Quarantine: time.Minute, Attach: agent.AttachAuto, Mark: 0x00800000, Listen: "127.0.0.1:9965",
		LogLevel: "info", Version: version,
	}
	if diff := cmp.Diff(want, got, comparePrefixes); diff != "" {
		t.Errorf("config -want +got:\n%s", diff)
	}
}

func TestFlagsReachTheConfig(t *testing.T) {
	args := []string{
		"--nodes-file=$NODES", "--node-name", "n1", "--api-server=https://10.0.0.1:6443, https://[2001:db8::1]:6443,https://api.example,https://10.0.0.1:6443/", "--attach-bridge=ecag-br0,docker0", "--routing-mode=vxlan", "--vxlan-port=8472", "--vxlan-vni=1", "--vxlan-udp-checksum=false", "--masquerade=false", "--masquerade-ipv6=false",
		"--non-masquerade-cidr", "10.0.0.0/8, 192.168.7.1/16", "--cluster-cidr=10.244.0.0/16", "--service-cidr=10.96.0.0/12,fd00::/108",
		"--kube-proxy=off", "--forward-accept=off", "--portmap=on", "--cni-chain=testdata/chain.json", "--services=on", "--external-ips=false", "--nodeport-addresses=192.0.2.0/24,::/0", "--snat-ports=1000-1999,2500-2999", "--snat-entries=5000",
		"--address-quarantine=5m", "--mtu=1400", "--attach=clsact", "--mark=0x10", "--listen=[::1]:9", "--metrics-listen=:9100", "--bpffs=/b/", "--state-dir=/s", "--cni-conf-dir=/c",
		"--cni-bin-dir=/o", "--proc-sys=/proc", "--log-level=debug", "--log-format=json",
	}
	for _, f := range new(options).flags() {
		elsewhere := slices.Contains([]string{"kubeconfig", "uplink", "snat-address", "cgroup"}, f.Name) || // these need a file, an interface and its address, a cgroup
			ofRegistry(f) // TestRegistry
		if !elsewhere && !slices.ContainsFunc(args, func(a string) bool { name, _, _ := strings.Cut(a, "="); return name == "--"+f.Name }) {
			t.Errorf("--%s is not among the flags given here", f.Name)
		}
	}
	c := call(t, nil, nil, args...)
	if c.status != 0 {
		t.Fatalf("status %d: %s", c.status, c.stderr)
	}
	got := *c.config
	got.NodesFile, got.Log = "", nil
	prefixes := func(texts ...string) (out []netip.Prefix) {
		for _, s := range texts {
			out = append(out, netip.MustParsePrefix(s))
		}
		return out
	}
	want := agent.Config{
		Directories: agent.Directories{BPFFS: "/b", State: "/s", Conf: "/c", Bin: "/o", ProcSys: "/proc", Plugin: "/image/ebpf-cni"},
		Node:        "n1", APIServers: []string{"https://10.0.0.1:6443", "https://[2001:db8::1]:6443", "https://api.example:443"}, Bridges: []string{"ecag-br0", "docker0"}, RoutingMode: agent.RouteVXLAN, VXLANPort: 8472, VXLANVNI: 1, Services: agent.ServicesOn, Cgroup: "/found", NonMasquerade: prefixes("10.0.0.0/8", "192.168.0.0/16"), Cluster: prefixes("10.244.0.0/16"),
		Service: prefixes("10.96.0.0/12", "fd00::/108"), NodePortAddresses: prefixes("192.0.2.0/24", "::/0"), SnatPorts: []agent.PortRange{{Low: 1000, High: 1999}, {Low: 2500, High: 2999}}, SnatEntries: 5000,
		Quarantine: 5 * time.Minute, KubeProxy: agent.KubeProxyOff, ForwardAccept: agent.ForwardAcceptOff, Portmap: true, Chain: []json.RawMessage{json.RawMessage(`{"type": "tuning", "sysctl": {"net.core.somaxconn": "500"}}`), json.RawMessage(`{"type": "sbr"}`)}, MTU: 1400, Attach: agent.AttachClsact, Mark: 0x10, Listen: "[::1]:9", MetricsListen: ":9100",
		LogLevel: "debug", Version: version,
	}
	if diff := cmp.Diff(want, got, comparePrefixes); diff != "" {
		t.Errorf("config -want +got:\n%s", diff)
	}
}

func TestRefusals(t *testing.T) {
	for _, tt := range []struct{ arg, says string }{
		{"--registry=zookeeper", "kubernetes or etcd"}, {"--etcd-endpoints=", "URLs such as"}, {"--etcd-endpoints=10.0.0.1:2379", "no such URL"}, {"--etcd-endpoints=http://a,https://b", "all https or all http"},
		{"--etcd-endpoints=http://a/v2", "no such URL"}, {"--etcd-prefix=coreos.com", "the beginning of a key"}, {"--etcd-prefix=/", "the beginning of a key"}, {"--etcd-cafile=/nowhere", "no such file"},
		{"--etcd-certfile=/nowhere", "no such file"}, {"--etcd-keyfile=/nowhere", "no such file"}, {"--etcd-username=", "the name of a user"}, {"--etcd-password-file=/nowhere", "no such file"},
		{"--public-ip=", "an address of this node"}, {"--public-ip=10.0.0.1,10.0.0.2", "of one family"}, {"--public-ip=127.0.0.1", "no address"}, {"--subnet-file=subnet.env", "absolute path"},
		{"--node-name=", "name of a Node"}, {"--node-name=a b", "name of a Node"},
		{"--kubeconfig=", "a kubeconfig file"}, {"--nodes-file=", "a file that exists"},
		{"--kubeconfig=/nowhere", "no such file"}, {"--nodes-file=/nowhere", "no such file"}, {"--nodes-file=/proc", "a file that exists"},
		{"--uplink=ecag-none", `no interface "ecag-none"`}, {"--uplink=lo", "lo is not"}, {"--uplink=,", "comma-separated"},
		{"--attach-bridge=lo", "lo is no bridge"}, {"--attach-bridge=a/b", "must not contain"}, {"--attach-bridge=,", "comma-separated"},
		{"--api-server=", "URLs such as"}, {"--api-server=,", "URLs such as"}, {"--api-server=10.0.0.1:6443", "no URL"}, {"--api-server=https://10.0.0.1,nonsense", "no URL"},
		{"--api-server=https://10.0.0.1/k8s", "more than a host"}, {"--api-server=https://me:secret@10.0.0.1", "more than a host"}, {"--api-server=https://10.0.0.1:0", "no port"},
		{"--routing-mode=ipip", "direct, vxlan or auto"}, {"--vxlan-port=0", "a number"}, {"--vxlan-port=65536", "a number"},
		{"--vxlan-vni=0", "a number"}, {"--vxlan-vni=16777216", "a number"}, {"--vxlan-udp-checksum=maybe", "true or false"},
		{"--kube-proxy=maybe", "auto, on or off"}, {"--forward-accept=on", "auto or off"},
		{"--portmap=1", "on or off"},
		{"--cni-chain=/nowhere", "no such file"}, {"--cni-chain=/proc", "is a directory"}, {"--cni-chain=cli_test.go", "not a JSON list"}, {"--cni-chain=testdata/chain-without-type.json", "plugin 2 is not"},
		{"--services=some", "auto, on or off"}, {"--external-ips=some", "true or false"},
		{"--nodeport-addresses=192.0.2.1", "not a prefix"}, {"--nodeport-addresses=::ffff:10.0.0.0/104", "refused"},
		{"--masquerade=maybe", "true or false"}, {"--masquerade-ipv6=maybe", "true or false"},
		{"--non-masquerade-cidr=0.0.0.0/0", "refused"}, {"--cluster-cidr=::/0", "refused"}, {"--service-cidr=10.0.0.0", "not a prefix"},
		{"--service-cidr=::ffff:10.0.0.0/104", "refused"},
		{"--snat-ports=0-5", "LOW-HIGH"}, {"--snat-ports=9-5", "LOW-HIGH"}, {"--snat-ports=5", "LOW-HIGH"}, {"--snat-ports=1-70000", "LOW-HIGH"},
		{"--snat-ports=", "LOW-HIGH"}, {"--snat-ports=1-2,", "LOW-HIGH"}, {"--snat-ports=1-2,4-5,7-8,10-11,13-14", "too many"},
		{"--snat-address=,", "addresses of this node"}, {"--snat-address=10.0.0", "not an address"}, {"--snat-address=fe80::1%lo", "not an address"}, {"--snat-address=lo=127.0.0.1", "can't answer"},
		{"--snat-address=192.0.2.1", "no interface of this node has the address 192.0.2.1"}, {"--snat-address=ecag-none=192.0.2.1", `no interface "ecag-none"`},
		{"--snat-entries=0", "a number"}, {"--snat-entries=x", "a number"}, {"--snat-entries=99999999", "a number"},
		{"--address-quarantine=-1s", "a duration"}, {"--address-quarantine=60", "a duration"},
		{"--mtu=5", "576"}, {"--mtu=70000", "65535"}, {"--mtu=-1", "576"},
		{"--attach=xdp", "auto, tcx or clsact"},
		{"--mark=0", "one bit"}, {"--mark=3", "one bit"}, {"--mark=0x4000", "kube-proxy"}, {"--mark=0x100000000", "one bit"},
		{"--listen=9965", "HOST:PORT"}, {"--listen=host.example:1", "HOST:PORT"}, {"--metrics-listen=:99999", "HOST:PORT"},
		{"--bpffs=relative", "absolute path"}, {"--state-dir=", "absolute path"}, {"--cni-conf-dir=x", "absolute path"}, {"--cni-bin-dir=x", "absolute path"},
		{"--proc-sys=/nowhere", "no such file"}, {"--proc-sys=/proc/version", "a directory"},
		{"--log-level=loud", "debug, info, warn or error"}, {"--log-format=xml", "text or json"},
	} {
		t.Run(tt.arg, func(t *testing.T) {
			name, _, _ := strings.Cut(tt.arg, "=")
			args := []string{tt.arg}
			if name != "--nodes-file" {
				args = append(args, "--nodes-file=$NODES")
			}
			c := call(t, nil, nil, args...)
			if c.status != 2 || c.config != nil {
				t.Fatalf("status %d, want 2; started: %v; %s", c.status, c.config != nil, c.stderr)
			}
			if strings.Count(c.stderr, "\n") != 1 || !strings.Contains(c.stderr, name+" ") || !strings.Contains(c.stderr, "takes ") || !strings.Contains(c.stderr, tt.says) {
				t.Errorf("not one line with the flag, what it takes and %q: %q", tt.says, c.stderr)
			}
		})
	}
}

func TestPortmapNeedsADirectory(t *testing.T) {
	c := call(t, nil, nil, "--nodes-file=$NODES", "--portmap=on", "--cni-bin-dir=")
	if c.status != 2 || !strings.Contains(c.stderr, "--cni-bin-dir is empty") {
		t.Errorf("status %d, %q", c.status, c.stderr)
	}
	if c := call(t, nil, nil, "--nodes-file=$NODES", "--cni-bin-dir="); c.status != 0 || c.config.Bin != "" {
		t.Errorf("off: status %d, %q", c.status, c.stderr)
	}
}

// What manifests of earlier versions say is no reason not to start.
func TestPortmapAuto(t *testing.T) {
	const warning = "--portmap=auto is off now"
	c := call(t, nil, nil, "--nodes-file=$NODES", "--portmap=auto")
	if c.status != 0 || c.config.Portmap || strings.Count(c.stderr, warning) != 1 {
		t.Errorf("auto: status %d, %q", c.status, c.stderr)
	}
	if c := call(t, nil, nil, "--nodes-file=$NODES", "--portmap=off"); c.status != 0 || strings.Contains(c.stderr, warning) {
		t.Errorf("off: status %d, %q", c.status, c.stderr)
	}
}

func TestUnknown(t *testing.T) {
	for _, args := range [][]string{{"--nonsense"}, {"--mtu"}, {"nonsense"}, {"cleanup", "--mtu=1"}, {"cleanup", "all"}} {
		c := call(t, nil, nil, args...)
		if c.status != 2 || strings.Count(c.stderr, "\n") != 1 || c.config != nil || c.cleaned != nil {
			t.Errorf("%q: status %d, %q", args, c.status, c.stderr)
		}
	}
}

func TestEnvironment(t *testing.T) {
	vars := map[string]string{"EBPF_AGENT_MTU": "1300", "EBPF_AGENT_SERVICE_CIDR": "10.96.0.0/12,10.97.0.0/16", "NODE_NAME": "from-pod", "EBPF_AGENT_ATTACH": "", "NOTIFY_SOCKET": "/run/notify"}
	c := call(t, nil, vars, "--nodes-file=$NODES")
	if c.status != 0 || c.config.MTU != 1300 || len(c.config.Service) != 2 || c.config.Node != "from-pod" || c.config.Attach != agent.AttachAuto || c.config.NotifySocket != "/run/notify" {
		t.Errorf("status %d, config %+v, %s", c.status, c.config, c.stderr)
	}
	vars["EBPF_AGENT_NODE_NAME"] = "from-variable"
	if c := call(t, nil, vars, "--nodes-file=$NODES", "--mtu=1200"); c.config == nil || c.config.MTU != 1200 || c.config.Node != "from-variable" {
		t.Errorf("config %+v, %s", c.config, c.stderr)
	}
	vars["EBPF_AGENT_MTU"] = "huge"
	c = call(t, nil, vars, "--nodes-file=$NODES")
	if c.status != 2 || !strings.Contains(c.stderr, "--mtu") || !strings.Contains(c.stderr, "EBPF_AGENT_MTU") {
		t.Errorf("status %d: %q", c.status, c.stderr)
	}
	c = call(t, nil, map[string]string{"EBPF_AGENT_CNI_BIN_DIR": ""}, "--nodes-file=$NODES")
	if c.status != 0 || c.config.Bin != "" {
		t.Errorf("an empty EBPF_AGENT_CNI_BIN_DIR: status %d, %+v", c.status, c.config)
	}
}

func TestEveryFlagHasItsVariable(t *testing.T) {
	for _, f := range new(options).flags() {
		c := call(t, nil, map[string]string{cli.Variable(f.Name): "\x01bad"}, "--nodes-file=$NODES")
		if f.Name == "nodes-file" { // given as a flag, which wins
			if c.status != 0 {
				t.Errorf("--nodes-file is overruled by its variable: %s", c.stderr)
			}
			continue
		}
		if c.status != 2 || !strings.Contains(c.stderr, "--"+f.Name+" ") {
			t.Errorf("%s is not read: status %d, %q", cli.Variable(f.Name), c.status, c.stderr)
		}
	}
}

func TestWithoutAnySource(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	c := call(t, nil, nil)
	if c.status != 2 || !strings.Contains(c.stderr, "--kubeconfig") || !strings.Contains(c.stderr, "--nodes-file") {
		t.Errorf("status %d: %q", c.status, c.stderr)
	}
	bad := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(bad, []byte("{{{\nnonsense"), 0o600); err != nil {
		t.Fatal(err)
	}
	if c := call(t, nil, nil, "--kubeconfig="+bad); c.status != 2 || strings.Count(c.stderr, "\n") != 1 || !strings.Contains(c.stderr, "--kubeconfig") {
		t.Errorf("status %d: %q", c.status, c.stderr)
	}
	if err := os.WriteFile(bad, []byte("root:x:0:0:root:/root:/bin/bash\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c = call(t, nil, nil, "--kubeconfig="+bad)
	if c.status != 2 || strings.Contains(c.stderr, "struct") || strings.Count(c.stderr, bad) != 1 || !strings.Contains(c.stderr, "takes a kubeconfig file") {
		t.Errorf("status %d: %q", c.status, c.stderr)
	}
}

func TestRemarks(t *testing.T) {
	other := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(other, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	c := call(t, nil, nil, "--nodes-file=$NODES", "--kubeconfig="+other, "--api-server=https://192.0.2.1", "--cluster-cidr=10.0.0.1/8", "--service-cidr=10.96.0.0/12,fd00::1/108")
	if c.status != 0 || strings.Count(c.stderr, "\n") != 4 {
		t.Fatalf("status %d: %q", c.status, c.stderr)
	}
	for _, says := range []string{"given=10.0.0.1/8 taken=10.0.0.0/8", "given=fd00::1/108 taken=fd00::/108", "--kubeconfig is not used", "--api-server is not used"} {
		if !strings.Contains(c.stderr, says) {
			t.Errorf("%q is not said: %s", says, c.stderr)
		}
	}
	if c := call(t, nil, nil, "--nodes-file=$NODES", "--cluster-cidr=10.0.0.0/8"); c.stderr != "" {
		t.Errorf("said without a reason: %q", c.stderr)
	}
}

func TestArguments(t *testing.T) {
	for _, tt := range []struct {
		args []string
		says string
	}{
		{[]string{"--masquerade", "false"}, "--masquerade=false"},
		{[]string{"--mtu=1400", "--masquerade", "0", "--portmap=off"}, "--masquerade=0"},
		{[]string{"version"}, "--version"},
		{[]string{"start"}, "cleanup"},
		{[]string{"--mtu=1400", "start"}, "cleanup"},
	} {
		if c := call(t, nil, nil, tt.args...); c.status != 2 || !strings.Contains(c.stderr, tt.says) || !strings.Contains(c.stderr, "unknown") {
			t.Errorf("%q: status %d: %q, want %q", tt.args, c.status, c.stderr, tt.says)
		}
	}
}

func TestHelpAndVersion(t *testing.T) {
	c := call(t, nil, nil, "--help")
	if c.status != 0 || c.stderr != "" {
		t.Fatalf("status %d: %q", c.status, c.stderr)
	}
	for _, f := range new(options).flags() {
		if !regexp.MustCompile(`(?m)^ +--` + f.Name + `[ \[]`).MatchString(c.stdout) {
			t.Errorf("--%s is not in the help", f.Name)
		}
	}
	if c := call(t, nil, nil, "--version"); c.status != 0 || !strings.Contains(c.stdout, version) {
		t.Errorf("status %d: %q", c.status, c.stdout)
	}
	c = call(t, nil, nil, "cleanup", "--help")
	if c.status != 0 || !strings.Contains(c.stdout, "--state-dir") || strings.Contains(c.stdout, "--mtu") {
		t.Errorf("status %d: %s", c.status, c.stdout)
	}
}

func TestCleanup(t *testing.T) {
	c := call(t, nil, map[string]string{"EBPF_AGENT_STATE_DIR": "/s"}, "cleanup", "--bpffs=/b", "--cni-bin-dir=/bin")
	want := agent.Directories{BPFFS: "/b", State: "/s", Conf: "/etc/cni/net.d", Bin: "/bin", ProcSys: "/proc/sys", Plugin: "/image/ebpf-cni"}
	if c.status != 0 || c.cleaned == nil || *c.cleaned != want {
		t.Errorf("status %d, %+v, %s", c.status, c.cleaned, c.stderr)
	}
}

// The agent's flag of that name is another one, and so is its variable.
func TestCleanupOfKubeProxy(t *testing.T) {
	c := call(t, nil, map[string]string{"EBPF_AGENT_KUBE_PROXY": "auto", "EBPF_AGENT_FORCE": "true"}, "cleanup", "--kube-proxy", "--state-dir=/s", "--bpffs=/b")
	if c.status != 0 || !c.ofKubeProxy || c.forced || c.cleaned.State != "/s" || c.cleaned.BPFFS != "/b" || c.stdout != "removed something\n" {
		t.Errorf("%+v", c)
	}
	if c := call(t, nil, map[string]string{"EBPF_AGENT_KUBE_PROXY": "on"}, "cleanup"); c.status != 0 || c.ofKubeProxy || c.cleaned == nil {
		t.Errorf("without the flag: %+v", c)
	}
	if c := call(t, nil, nil, "cleanup", "--kube-proxy", "--force"); c.status != 0 || !c.ofKubeProxy || !c.forced {
		t.Errorf("by force: %+v", c)
	}
	if c := call(t, nil, nil, "cleanup", "--force"); c.status != cli.Misused || !strings.Contains(c.stderr, "--force: is for --kube-proxy alone") || c.cleaned != nil {
		t.Errorf("of ours by force: %+v", c)
	}
	if c := call(t, agent.ErrKubeProxy, nil, "cleanup", "--kube-proxy"); c.status != cli.Failed || !strings.Contains(c.stderr, agent.ErrKubeProxy.Error()) {
		t.Errorf("a failure: %+v", c)
	}
}

func TestFailureIsStatusOne(t *testing.T) {
	for _, args := range [][]string{{"--nodes-file=$NODES"}, {"cleanup"}} {
		c := call(t, errors.New("load programs: no"), nil, args...)
		if c.status != 1 || !strings.Contains(c.stderr, "ebpf-agent: load programs: no\n") {
			t.Errorf("%q: status %d, %q", args, c.status, c.stderr)
		}
	}
}

func TestFlagNamesAreUnique(t *testing.T) {
	var names []string
	for _, f := range new(options).flags() {
		names = append(names, f.Name)
	}
	slices.Sort(names)
	if len(slices.Compact(slices.Clone(names))) != len(names) {
		t.Errorf("a flag stands twice: %v", names)
	}
}
