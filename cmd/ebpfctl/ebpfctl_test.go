package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/ebpf-cni/ebpf-cni/cmd/internal/cli"
	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint"
	"github.com/ebpf-cni/ebpf-cni/pkg/endpoint/ipam"
	"github.com/ebpf-cni/ebpf-cni/test/pins"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// result is what one call of the program gave.
type result struct {
	status         int
	stdout, stderr string
}

// call runs ebpfctl in this process, with an empty environment.
func call(t *testing.T, args ...string) result {
	t.Helper()
	return callWith(t, nil, args...)
}

func callWith(t *testing.T, environ map[string]string, args ...string) result {
	t.Helper()
	var stdout, stderr bytes.Buffer
	status := run(t.Context(), env{
		stdout: &stdout, stderr: &stderr, args: args, lookup: func(name string) (string, bool) { v, ok := environ[name]; return v, ok },
	})
	return result{status, stdout.String(), stderr.String()}
}

// host is a node's directories.
type host struct {
	bpffs, stateDir string
}

func (h host) args(args ...string) []string {
	return append([]string{"--bpffs", h.bpffs, "--state-dir", h.stateDir}, args...)
}

// newHost pins empty maps and writes two endpoints.
func newHost(t *testing.T) host {
	t.Helper()
	h := host{bpffs: priv.Isolate(t) + "/ebpf-cni", stateDir: t.TempDir()}
	pins.Maps(t, bpffs.Dir(h.bpffs))
	h.addEndpoint(t, "10.244.1.10", 43)
	h.addEndpoint(t, "10.244.1.9", 42)
	return h
}

func (h host) addEndpoint(t *testing.T, address string, ifindex uint32) {
	t.Helper()
	m, err := endpoints.Open(bpffs.Dir(h.bpffs).Map(endpoints.Name))
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	key := endpoints.Key{Address: wire.AddrFrom(netip.MustParseAddr(address))}
	if err := m.Put(key, endpoints.Value{Ifindex: ifindex}); err != nil {
		t.Fatal(err)
	}
}

func TestWrongUsage(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		want []string
	}{
		"unknown map":        {[]string{"dump", "frobs"}, []string{`no map is called "frobs"`, "endpoints, devices", "ipam and all"}},
		"unknown among many": {[]string{"dump", "all", "frobs"}, []string{`"frobs"`}},
		"no map":             {[]string{"dump"}, []string{"which map", "endpoints"}},
		"unknown command":    {[]string{"frob"}, []string{`unknown command "frob"`}},
		"unknown flag":       {[]string{"status", "--frob"}, []string{"unknown flag: --frob"}},
		"unknown format":     {[]string{"-o", "xml", "status"}, []string{`--output "xml": takes table, json or yaml`}},
		"argument of status": {[]string{"status", "now"}, []string{`unknown command "now"`}},
		"no shell":           {[]string{"completion"}, []string{"accepts 1 arg"}},
		"unknown shell":      {[]string{"completion", "tcsh"}, []string{`invalid argument "tcsh"`}},
		"watch is no time":   {[]string{"dump", "drops", "--watch=5"}, []string{`--watch "5": takes no value, true or false; --interval says how often; `}},
		"interval is none":   {[]string{"dump", "drops", "--interval", "5"}, []string{`--interval "5": takes a duration of 1ms or more, such as`}},
		"no variable":        {[]string{"docker-opts", "-k", "DOCKER-OPTS"}, []string{`--combined-key "DOCKER-OPTS": takes the name of`}},
		"no file":            {[]string{"docker-opts", "-d", ""}, []string{`--docker-file "": takes the path of a file`}},
		"interval":           {[]string{"dump", "all", "--watch", "--interval", "0s"}, []string{`--interval "0s": takes a duration`}},
	} {
		t.Run(name, func(t *testing.T) {
			got := call(t, c.args...)
			if got.status != cli.Misused || got.stdout != "" {
				t.Errorf("status %d, stdout %q; want %d and nothing", got.status, got.stdout, cli.Misused)
			}
			for _, want := range append(c.want, "ebpfctl: ", "--help") {
				if !strings.Contains(got.stderr, want) {
					t.Errorf("stderr does not say %q:\n%s", want, got.stderr)
				}
			}
		})
	}
}

func TestDumpTable(t *testing.T) {
	h := newHost(t)
	got := call(t, h.args("dump", "endpoints")...)
	want := result{cli.Fine, `ADDRESS      IFINDEX  POD MAC  HOST MAC  POD NAME
10.244.1.9        42  -        -         -
10.244.1.10       43  -        -         -
`, ""}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(result{})); diff != "" {
		t.Error(diff)
	}
	got = call(t, h.args("dump", "uplinks", "endpoints", "uplinks")...)
	want.stdout = "== uplinks ==\nIFINDEX  IPV4  IPV6  BIT  FLAGS\n\n== endpoints ==\n" + want.stdout
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(result{})); diff != "" {
		t.Errorf("several maps: %s", diff)
	}
}

// TestDumpFormats compares what the formats hold with each other.
func TestDumpFormats(t *testing.T) {
	h := newHost(t)
	for _, args := range [][]string{{"all"}, {"endpoints"}, {"uplinks"}, {"drops", "endpoints"}} {
		var fromJSON, fromYAML any
		asJSON := call(t, h.args(append([]string{"-o", "json", "dump"}, args...)...)...)
		asYAML := call(t, h.args(append([]string{"-o", "yaml", "dump"}, args...)...)...)
		if asJSON.status != cli.Fine || asYAML.status != cli.Fine || asJSON.stderr+asYAML.stderr != "" {
			t.Fatalf("%v: %+v %+v", args, asJSON, asYAML)
		}
		if err := json.Unmarshal([]byte(asJSON.stdout), &fromJSON); err != nil {
			t.Errorf("%v: %v in\n%s", args, err, asJSON.stdout)
		}
		if err := yaml.Unmarshal([]byte(asYAML.stdout), &fromYAML); err != nil {
			t.Errorf("%v: %v in\n%s", args, err, asYAML.stdout)
		}
		if diff := cmp.Diff(fromJSON, fromYAML); diff != "" {
			t.Errorf("%v: JSON and YAML differ:\n%s", args, diff)
		}
		if again := call(t, h.args(append([]string{"-o", "json", "dump"}, args...)...)...); again != asJSON {
			t.Errorf("%v: JSON is not stable", args)
		}
		if _, array := fromJSON.([]any); array != (len(args) == 1 && args[0] != everything) {
			t.Errorf("%v: one map is an array, several are an object; this is %T", args, fromJSON)
		}
	}
}

func TestDumpAllHasEveryMap(t *testing.T) {
	h := newHost(t)
	got := call(t, h.args("-o", "json", "dump", "all")...)
	var all map[string][]map[string]any
	if err := json.Unmarshal([]byte(got.stdout), &all); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{
		"endpoints", "devices", "destinations", "uplinks", "snat", "snat_reverse", "conntrack", "fragments", "drops",
		"traffic", "config", "ipam", "usage",
	} {
		if _, ok := all[name]; !ok {
			t.Errorf("dump all lacks %s", name)
		}
	}
	if len(all["endpoints"]) != 2 || all["endpoints"][0]["address"] != "10.244.1.9" {
		t.Errorf("endpoints: %v", all["endpoints"])
	}
	if len(all["config"]) != 1 {
		t.Errorf("config: %v", all["config"])
	}
}

func TestDumpWithoutDataplane(t *testing.T) {
	dir := priv.Isolate(t) + "/none"
	got := call(t, "--bpffs", dir, "dump", "endpoints")
	if got.status != cli.Failed || got.stdout != "" || strings.Count(got.stderr, "\n") != 1 || !strings.Contains(got.stderr, dir) {
		t.Errorf("want one line that names the directory: %+v", got)
	}
}

func TestDirectoriesFromEnvironment(t *testing.T) {
	h := newHost(t)
	environ := map[string]string{"EBPF_AGENT_BPFFS": h.bpffs, "EBPF_AGENT_STATE_DIR": h.stateDir}
	if got := callWith(t, environ, "dump", "endpoints"); got.status != cli.Fine {
		t.Errorf("from the environment: %+v", got)
	}
	if got := callWith(t, environ, "--bpffs", "/nowhere", "dump", "endpoints"); got.status != cli.Failed {
		t.Errorf("the flag must win: %+v", got)
	}
}

func TestDumpIPAM(t *testing.T) {
	stateDir := t.TempDir()
	if got := call(t, "--state-dir", stateDir, "dump", "ipam"); got.stdout != "NETWORK  ADDRESS  STATE  CONTAINER  IFNAME  SINCE  POD NAME\n" || got.status != cli.Fine {
		t.Errorf("no addresses: %+v", got)
	}
	store, err := ipam.Open(stateDir, "ebpf-cni", ipam.Options{Quarantine: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	conf, err := ipam.Parse([]byte(`{"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.244.1.0/24"}]]}}`), "")
	if err != nil {
		t.Fatal(err)
	}
	id := strings.Repeat("0123456789abcdef", 4)
	for _, o := range []ipam.Owner{{ContainerID: id, IfName: "eth0"}, {ContainerID: "gone", IfName: "eth0"}} {
		if _, err := store.Allocate(t.Context(), o, conf); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := store.Release(t.Context(), ipam.Owner{ContainerID: "gone", IfName: "eth0"}); err != nil {
		t.Fatal(err)
	}

	err = endpoint.Write(stateDir, endpoint.Endpoint{ID: endpoint.ID{ContainerID: id, IfName: "eth0"}, Pod: "shop/web", PodUID: "6ba7-1"})
	if err != nil {
		t.Fatal(err)
	}

	got := call(t, "--state-dir", stateDir, "dump", "ipam")
	want := regexp.MustCompile(`^NETWORK   ADDRESS     STATE        CONTAINER      IFNAME  SINCE  POD NAME
ebpf-cni  10\.244\.1\.2  used         0123456789abc  eth0       \ds  shop/web
ebpf-cni  10\.244\.1\.3  quarantined  gone           eth0       \ds  -
$`)
	if !want.MatchString(got.stdout) {
		t.Errorf("table:\n%s", got.stdout)
	}
	var rows []map[string]string
	if err := json.Unmarshal([]byte(call(t, "--state-dir", stateDir, "-o", "json", "dump", "ipam").stdout), &rows); err != nil {
		t.Fatal(err)
	}
	if len(rows) != 2 || rows[0]["container_id"] != id || rows[0]["state"] != "used" || rows[1]["state"] != "quarantined" {
		t.Errorf("JSON: %v", rows)
	}
	if rows[0]["pod_namespace"] != "shop" || rows[0]["pod_name"] != "web" || rows[0]["pod_uid"] != "6ba7-1" || rows[1]["pod_name"] != "" {
		t.Errorf("the pods' names in JSON: %v", rows)
	}
	if _, err := time.Parse(time.RFC3339Nano, rows[0]["since"]); err != nil {
		t.Errorf("since: %v", err)
	}
}

func TestWriteErrorIsReported(t *testing.T) {
	var stderr bytes.Buffer
	r, w := io.Pipe()
	r.CloseWithError(os.ErrClosed)
	status := run(t.Context(), env{
		stdout: w, stderr: &stderr, args: []string{"--state-dir", t.TempDir(), "dump", "ipam"}, lookup: func(string) (string, bool) { return "", false },
	})
	if status != cli.Failed || !strings.Contains(stderr.String(), "write") {
		t.Errorf("status %d, stderr %q", status, stderr.String())
	}
}

func TestVersion(t *testing.T) {
	got := call(t, "version")
	if got.status != cli.Fine || !strings.HasPrefix(got.stdout, "ebpfctl version "+version+" (map layout 3, go") {
		t.Errorf("%+v", got)
	}
	if flag := call(t, "--version"); flag != got {
		t.Errorf("--version gives %+v, version %+v", flag, got)
	}
	var v versionInfo
	if err := json.Unmarshal([]byte(call(t, "version", "-o", "json").stdout), &v); err != nil || v.Layout != wire.LayoutVersion {
		t.Errorf("%+v, %v", v, err)
	}
}

func TestHelp(t *testing.T) {
	for _, args := range [][]string{{"--help"}, {"dump", "--help"}, {"status", "-h"}} {
		if got := call(t, args...); got.status != cli.Fine || got.stdout == "" || got.stderr != "" {
			t.Errorf("%v: %+v", args, got)
		}
	}
}

func TestCompletion(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		if got := call(t, "completion", shell); got.status != cli.Fine || !strings.Contains(got.stdout, "ebpfctl") {
			t.Errorf("%s: status %d, %d bytes, %s", shell, got.status, len(got.stdout), got.stderr)
		}
	}
	for _, c := range []struct {
		args []string
		want []string
	}{
		{[]string{"dump", "sn"}, []string{"snat", "snat_reverse"}},
		{[]string{"dump", "endpoints", "al"}, []string{"all"}},
		{[]string{"-o", "j"}, []string{"json"}},
	} {
		got := call(t, append([]string{"__complete"}, c.args...)...)
		var words []string
		for s := bufio.NewScanner(strings.NewReader(got.stdout)); s.Scan() && !strings.HasPrefix(s.Text(), ":"); {
			if strings.HasPrefix(s.Text(), c.args[len(c.args)-1]) {
				words = append(words, s.Text())
			}
		}
		slices.Sort(words)
		if !slices.Equal(words, c.want) {
			t.Errorf("completion of %q: %q, want %q", c.args, words, c.want)
		}
	}
}

func TestConfigIsShownBeforeTheAgentWroteIt(t *testing.T) {
	h := newHost(t)
	if got := call(t, h.args("dump", config.Name)...); got.status != cli.Fine || strings.Count(got.stdout, "\n") != 2 {
		t.Errorf("%+v", got)
	}
}
