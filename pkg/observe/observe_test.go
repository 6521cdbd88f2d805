package observe

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/maps/endpoints"
	"github.com/ebpf-cni/ebpf-cni/maps/snat"
	"github.com/ebpf-cni/ebpf-cni/maps/typed"
	"github.com/ebpf-cni/ebpf-cni/maps/usage"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/test/pins"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// filledJSON is what fillAll writes, by map.
var filledJSON = map[string]string{
	"endpoints": `[
  {"address": "10.244.1.9", "ifindex": 42, "pod_mac": "02:00:00:00:00:01", "host_mac": "02:00:00:00:00:02", "pod_namespace": "shop", "pod_name": "web", "pod_uid": "6ba7-1"},
  {"address": "10.244.1.10", "ifindex": 43, "pod_mac": "02:00:00:00:00:03", "host_mac": "02:00:00:00:00:04", "pod_namespace": "", "pod_name": "", "pod_uid": ""}
]`,
	"devices": `[
  {"ifindex": 42, "ipv4": "10.244.1.9", "ipv6": "", "pod_mac": "02:00:00:00:00:01", "host_mac": "02:00:00:00:00:02", "snat_flows": 3, "packets": 12345, "bytes": 9876543210, "conntrack_flows": 1, "answers_until": 0, "allowance_until": 0, "netns": 0, "flags": "", "pod_namespace": "shop", "pod_name": "web", "pod_uid": "6ba7-1"}
]`,
	"bridges": `[
  {"prefix": "10.244.1.128/25", "ifindex": 44, "pod_mac": "", "host_mac": ""},
  {"prefix": "10.244.1.129/32", "ifindex": 0, "pod_mac": "", "host_mac": ""}
]`,
	"destinations": `[
  {"prefix": "10.244.1.0/24", "kind": "local", "ifindex": 0, "node": "", "mtu": 0, "flags": "", "neighbour_checked": 0, "uplinks": 0, "mac": "", "learnt_mtu": 0, "alias": ""},
  {"prefix": "10.244.2.0/24", "kind": "pod_cidr", "ifindex": 2, "node": "172.18.0.3", "mtu": 1500, "flags": "to_stack", "neighbour_checked": 35997000000000, "uplinks": 9, "mac": "", "learnt_mtu": 0, "alias": ""},
  {"prefix": "172.18.0.2/32", "kind": "host", "ifindex": 0, "node": "", "mtu": 0, "flags": "", "neighbour_checked": 0, "uplinks": 0, "mac": "", "learnt_mtu": 0, "alias": ""},
  {"prefix": "fd00::/48", "kind": "native", "ifindex": 0, "node": "", "mtu": 0, "flags": "", "neighbour_checked": 0, "uplinks": 0, "mac": "", "learnt_mtu": 0, "alias": ""}
]`,
	"services": `[
  {"address": "::", "port": 30053, "proto": "udp", "set": 5, "flags": "", "service_namespace": "kube-system", "service_name": "kube-dns", "service_port_name": "dns", "cluster": 2, "local": 1},
  {"address": "0.0.0.0", "port": 30053, "proto": "udp", "set": 5, "flags": "external_local", "service_namespace": "kube-system", "service_name": "kube-dns", "service_port_name": "dns", "cluster": 2, "local": 1},
  {"address": "10.96.0.10", "port": 0, "proto": "", "set": 0, "flags": "cluster_ip|answers", "service_namespace": "", "service_name": "", "service_port_name": "", "cluster": 0, "local": 0},
  {"address": "10.96.0.10", "port": 53, "proto": "udp", "set": 5, "flags": "local", "service_namespace": "kube-system", "service_name": "kube-dns", "service_port_name": "dns", "cluster": 2, "local": 1},
  {"address": "172.18.0.2", "port": 0, "proto": "", "set": 0, "flags": "node|own", "service_namespace": "", "service_name": "", "service_port_name": "", "cluster": 0, "local": 0}
]`,
	"source_range": `[
  {"set": 5, "source": "192.0.2.0/24", "service_namespace": "kube-system", "service_name": "kube-dns", "service_port_name": "dns"},
  {"set": 5, "source": "2001:db8::/32", "service_namespace": "kube-system", "service_name": "kube-dns", "service_port_name": "dns"}
]`,
	"backends": `[
  {"backend": 9, "address": "10.244.2.7", "port": 5353, "proto": "udp", "flags": "serving|on_node", "generation": 2, "set": 5, "service_namespace": "kube-system", "service_name": "kube-dns", "service_port_name": "dns"}
]`,
	"hostports": `[
  {"address": "172.18.0.2", "port": 443, "proto": "tcp", "pod_address": "10.244.1.9", "pod_port": 80, "ifindex": 42, "pod_namespace": "shop", "pod_name": "web", "pod_uid": "6ba7-1"},
  {"address": "::", "port": 8080, "proto": "tcp", "pod_address": "10.244.1.9", "pod_port": 80, "ifindex": 42, "pod_namespace": "shop", "pod_name": "web", "pod_uid": "6ba7-1"},
  {"address": "0.0.0.0", "port": 8080, "proto": "tcp", "pod_address": "10.244.1.9", "pod_port": 80, "ifindex": 42, "pod_namespace": "shop", "pod_name": "web", "pod_uid": "6ba7-1"}
]`,
	"affinity": `[
  {"client": "10.244.1.9", "set": 5, "backend": 9, "generation": 2, "ifindex": 42, "last_seen": 35940000000000, "service_namespace": "kube-system", "service_name": "kube-dns", "service_port_name": "dns", "pod_namespace": "shop", "pod_name": "web", "pod_uid": "6ba7-1"}
]`,
	"clients": `[
  {"client": "192.0.2.80", "set": 5, "backend": 9, "generation": 2, "last_seen": 35940000000000, "service_namespace": "kube-system", "service_name": "kube-dns", "service_port_name": "dns"}
]`,
	"sockets": `[
  {"cookie": 77, "number": 0, "frontend_address": "10.96.0.10", "backend_address": "10.244.2.7", "frontend_port": 53, "backend_port": 5353, "proto": "udp", "connected": 1, "set": 5, "backend": 9, "generation": 2, "service_namespace": "kube-system", "service_name": "kube-dns", "service_port_name": "dns"},
  {"cookie": 77, "number": 1, "frontend_address": "10.96.0.10", "backend_address": "10.244.2.7", "frontend_port": 53, "backend_port": 5353, "proto": "udp", "connected": 1, "set": 5, "backend": 9, "generation": 2, "service_namespace": "kube-system", "service_name": "kube-dns", "service_port_name": "dns"}
]`,
	"uplinks": `[
  {"ifindex": 2, "ipv4": "172.18.0.2", "ipv6": "", "bit": 3, "flags": ""}
]`,
	"sources": `[
  {"ifindex": 2, "prefix": "10.0.0.0/8", "address": "192.0.2.2"}
]`,
	"snat": `[
  {"src": "10.244.1.9", "dst": "192.0.2.80", "sport": 40000, "dport": 443, "proto": "tcp", "to_address": "172.18.0.2", "to_port": 50000, "state": "syn|ack", "flags": "", "ifindex": 42, "seq_end": 0, "ack": 0, "last_seen": 35910000000000, "far_address": "", "set": 0, "backend": 0, "generation": 0, "far_port": 0, "pod": 0, "pod_namespace": "shop", "pod_name": "web", "pod_uid": "6ba7-1"},
  {"src": "10.244.1.9", "dst": "10.96.0.10", "sport": 40001, "dport": 53, "proto": "udp", "to_address": "10.244.1.9", "to_port": 40001, "state": "", "flags": "service", "ifindex": 42, "seq_end": 0, "ack": 0, "last_seen": 35999000000000, "far_address": "10.244.2.7", "set": 5, "backend": 9, "generation": 2, "far_port": 5353, "pod": 0, "pod_namespace": "shop", "pod_name": "web", "pod_uid": "6ba7-1"}
]`,
	"snat_reverse": `[
  {"src": "172.18.0.2", "dst": "192.0.2.80", "sport": 50000, "dport": 443, "proto": "tcp", "to_address": "10.244.1.9", "to_port": 40000, "state": "ack", "flags": "via_stack", "ifindex": 42, "seq_end": 0, "ack": 0, "last_seen": 35700000000000, "far_address": "", "set": 0, "backend": 0, "generation": 0, "far_port": 0, "pod": 0, "pod_namespace": "shop", "pod_name": "web", "pod_uid": "6ba7-1"}
]`,
	"conntrack": `[
  {"src": "10.244.1.9", "dst": "192.0.2.81", "sport": 80, "dport": 5555, "proto": "tcp", "ifindex": 42, "from_pod": "ack", "from_world": "syn", "flags": "", "pod_seq_end": 0, "pod_ack": 0, "world_seq_end": 0, "world_ack": 0, "last_seen": 35999999999999, "pod_namespace": "shop", "pod_name": "web", "pod_uid": "6ba7-1"}
]`,
	"fragments": `[
  {"src": "10.244.1.9", "dst": "192.0.2.80", "id": 777, "proto": "udp", "sport": 4000, "dport": 53, "ifindex": 42, "last_seen": 35999999999999, "pod_namespace": "shop", "pod_name": "web", "pod_uid": "6ba7-1"}
]`,
	"drops": `[
  {"direction": "from_pod", "reason": "SPOOFED_SOURCE", "packets": 2, "bytes": 128, "explanation": "source is not an address that the sender can have"}
]`,
	"traffic": `[
  {"direction": "from_uplink", "event": "delivered", "packets": 5, "bytes": 500, "explanation": "redirected into a pod of this node"}
]`,
	"config": `[
  {"layout": 3, "node_ipv4": "172.18.0.2", "node_ipv6": "", "pod_cidr_ipv4": "10.244.1.0/24", "pod_cidr_ipv6": "", "flags": "routes_to_stack", "tunnel_ifindex": 7, "tunnel_source_ipv4": "172.18.0.2", "tunnel_address_ipv4": "10.244.1.0", "tunnel_source_ipv6": "", "tunnel_address_ipv6": ""}
]`,
	"usage": `[
  {"table": "snat", "entries": 7, "head": 0, "tail": 0, "swept": 0},
  {"table": "conntrack", "entries": 1, "head": 0, "tail": 0, "swept": 0}
]`,
}

func TestReadJSON(t *testing.T) {
	r := isolated(t)
	fillAll(t, r)
	if len(filledJSON) != len(Names()) {
		t.Errorf("%d maps are expected, %d are known: %v", len(filledJSON), len(Names()), Names())
	}
	for _, name := range Names() {
		table, err := r.Read(name)
		if err != nil {
			t.Error(err)
			continue
		}
		var b strings.Builder
		if err := table.WriteJSON(&b, false); err != nil {
			t.Error(err)
		}
		if strings.TrimSpace(b.String()) == "[]" {
			t.Errorf("%s has no record: fillAll gives it none", name)
		}
		if diff := cmp.Diff(filledJSON[name], b.String()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		assertSameOnOneLine(t, table, b.String())
	}
}

// assertSameOnOneLine compares the two forms of the JSON.
func assertSameOnOneLine(t *testing.T, table typed.Table, lines string) {
	t.Helper()
	var b strings.Builder
	if err := table.WriteJSON(&b, true); err != nil {
		t.Error(err)
	}
	var one, many any
	if err := errors.Join(json.Unmarshal([]byte(b.String()), &one), json.Unmarshal([]byte(lines), &many)); err != nil {
		t.Error(err)
	}
	if strings.Contains(b.String(), "\n") || !cmp.Equal(one, many) {
		t.Errorf("%s in one line: %s", table.Name, b.String())
	}
}

func TestReadText(t *testing.T) {
	r := isolated(t)
	fillAll(t, r)
	for name, want := range map[string]string{
		"endpoints": `
ADDRESS      IFINDEX  POD MAC            HOST MAC           POD NAME
10.244.1.9        42  02:00:00:00:00:01  02:00:00:00:00:02  shop/web
10.244.1.10       43  02:00:00:00:00:03  02:00:00:00:00:04  -
`,
		"destinations": `
PREFIX         KIND      NODE        IFINDEX   MTU  FLAGS     UPLINKS  MAC  ALIAS  LEARNT-MTU  CHECKED
10.244.1.0/24  local     -                 -     -  -         -        -    -               -        -
10.244.2.0/24  pod_cidr  172.18.0.3        2  1500  to_stack  0,3      -    -               -       3s
172.18.0.2/32  host      -                 -     -  -         -        -    -               -        -
fd00::/48      native    -                 -     -  -         -        -    -               -        -
`,
		"services": `
PROTO  FRONTEND       SET  FLAGS               SERVICE               PORT NAME  CLUSTER  LOCAL
udp    *:30053          5  -                   kube-system/kube-dns  dns              2      1
udp    *:30053          5  external_local      kube-system/kube-dns  dns              2      1
-      10.96.0.10       -  cluster_ip|answers  -                     -                -      -
udp    10.96.0.10:53    5  local               kube-system/kube-dns  dns              2      1
-      172.18.0.2       -  node|own            -                     -                -      -
`,
		"source_range": `
SET  SOURCE         SERVICE               PORT NAME
  5  192.0.2.0/24   kube-system/kube-dns  dns
  5  2001:db8::/32  kube-system/kube-dns  dns
`,
		"backends": `
BACKEND  PROTO  ENDPOINT         SET  FLAGS            GENERATION  SERVICE               PORT NAME
      9  udp    10.244.2.7:5353    5  serving|on_node           2  kube-system/kube-dns  dns
`,
		"hostports": `
PROTO  HOST            POD            IFINDEX  POD NAME
tcp    172.18.0.2:443  10.244.1.9:80       42  shop/web
tcp    [::]:8080       10.244.1.9:80       42  shop/web
tcp    0.0.0.0:8080    10.244.1.9:80       42  shop/web
`,
		"affinity": `
CLIENT      SET  BACKEND  IFINDEX  AGE  SERVICE               PORT NAME  POD NAME
10.244.1.9    5        9       42  60s  kube-system/kube-dns  dns        shop/web
`,
		"clients": `
CLIENT      SET  BACKEND  AGE  SERVICE               PORT NAME
192.0.2.80    5        9  60s  kube-system/kube-dns  dns
`,
		"sockets": `
COOKIE  PROTO  FRONTEND       ENDPOINT         SET  BACKEND  SERVICE               PORT NAME
    77  udp    10.96.0.10:53  10.244.2.7:5353    5        9  kube-system/kube-dns  dns
    77  udp    10.96.0.10:53  10.244.2.7:5353    5        9  kube-system/kube-dns  dns
`,
		"snat": `
PROTO  SOURCE            DESTINATION     AS                BACKEND          STATE    FLAGS    IFINDEX  AGE  POD NAME
tcp    10.244.1.9:40000  192.0.2.80:443  172.18.0.2:50000  -                syn|ack  -             42  90s  shop/web
udp    10.244.1.9:40001  10.96.0.10:53   10.244.1.9:40001  10.244.2.7:5353  -        service       42   1s  shop/web
`,
		"snat_reverse": `
PROTO  SOURCE            DESTINATION     POD               SERVICE  STATE  FLAGS      IFINDEX  AGE  POD NAME
tcp    172.18.0.2:50000  192.0.2.80:443  10.244.1.9:40000  -        ack    via_stack       42   5m  shop/web
`,
		"drops": `
DIRECTION  REASON          PACKETS  BYTES  EXPLANATION
from_pod   SPOOFED_SOURCE        2    128  source is not an address that the sender can have
`,
		"config": `
LAYOUT  NODE IPV4   NODE IPV6  POD CIDR IPV4  POD CIDR IPV6  FLAGS            TUNNEL  TUNNEL SOURCE IPV4  TUNNEL ADDRESS IPV4  TUNNEL SOURCE IPV6  TUNNEL ADDRESS IPV6
     3  172.18.0.2  -          10.244.1.0/24  -              routes_to_stack       7  172.18.0.2          10.244.1.0           -                   -
`,
	} {
		table, err := r.Read(name)
		if err != nil {
			t.Error(err)
			continue
		}
		var b strings.Builder
		if err := table.WriteText(&b); err != nil {
			t.Error(err)
		}
		if diff := cmp.Diff(want, "\n"+b.String()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestEmptyMaps(t *testing.T) {
	r := isolated(t)
	for _, name := range Names() {
		table, err := r.Read(name)
		if err != nil {
			t.Error(err)
			continue
		}
		var text, doc strings.Builder
		if err := errors.Join(table.WriteText(&text), table.WriteJSON(&doc, false)); err != nil {
			t.Error(err)
		}
		array := name == config.Name || name == usage.Name
		if lines := strings.Count(text.String(), "\n"); lines != 1 && !array {
			t.Errorf("%s: an empty table has %d lines, want the header alone:\n%s", name, lines, text.String())
		}
		if doc.String() != "[]" && !array {
			t.Errorf("%s: empty JSON is %s", name, doc.String())
		}
	}
}

func TestReadOfMissingPin(t *testing.T) {
	r := Reader{Dir: bpffs.Dir(priv.Isolate(t) + "/nothing")}
	_, err := r.Read(endpoints.Name)
	if !errors.Is(err, ErrNoPin) || !strings.Contains(err.Error(), string(r.Dir)) || !strings.Contains(err.Error(), "--bpffs") {
		t.Errorf("error must say where and what to do: %v", err)
	}
	if _, err := r.Read("frobs"); err == nil || errors.Is(err, ErrNoPin) {
		t.Errorf("an unknown map: %v", err)
	}
}

// TestReadOfChangingHash reads while a writer adds and deletes: what is there
// all the time must be seen, once.
func TestReadOfChangingHash(t *testing.T) {
	r := isolated(t)
	const stable = 1500
	var entries []typed.Entry[snat.Key, snat.Value]
	for i := range stable {
		entries = append(entries, typed.Entry[snat.Key, snat.Value]{Key: flowKey(i), Value: snat.Value{LastSeen: 1}})
	}
	put(t, r, snat.Name, entries...)

	m, err := typed.Open[snat.Key, snat.Value](r.Dir.Map(snat.Name))
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	stop, done := make(chan struct{}), make(chan error)
	go func() {
		for i := stable; ; i++ {
			select {
			case <-stop:
				done <- nil
				return
			default:
			}
			key := flowKey(stable + i%1000)
			if err := errors.Join(m.Put(key, snat.Value{}), m.Delete(key)); err != nil {
				done <- err
				return
			}
		}
	}()
	for range 20 {
		table, err := r.Read(snat.Name)
		if err != nil {
			t.Fatal(err)
		}
		seen := map[string]int{}
		for i := range table.Len {
			seen[strings.Join(table.Cells(i)[:3], " ")]++
		}
		for i := range stable {
			k := flowKey(i)
			if n := seen[fmt.Sprintf("%s %s %s", k.Proto, k.Src.With(k.Sport), k.Dst.With(k.Dport))]; n != 1 {
				t.Fatalf("flow %d was seen %d times", i, n)
			}
		}
	}
	close(stop)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func flowKey(i int) snat.Key {
	a := addr("10.244.1.9")
	a[15] = byte(i >> 8)
	return snat.Key{Src: a, Dst: addr("192.0.2.1"), Sport: wire.PortFrom(uint16(i)), Dport: wire.PortFrom(80), Proto: wire.UDP}
}

func TestFills(t *testing.T) {
	r := isolated(t)
	fillAll(t, r)
	var entries []typed.Entry[snat.Key, snat.Value]
	for i := range 3000 {
		entries = append(entries, typed.Entry[snat.Key, snat.Value]{Key: flowKey(i)})
	}
	put(t, r, snat.ReverseName, entries...)
	got, err := Fills(r.Dir)
	if err != nil {
		t.Fatal(err)
	}
	// Whatever else there is, fillAll leaves empty.
	got = slices.DeleteFunc(got, func(f Fill) bool { return f.Entries == 0 })
	want := []Fill{
		{"endpoints", 2, pins.Entries},
		{"devices", 1, pins.Entries},
		{"bridges", 2, 1024},
		{"destinations", 4, pins.Entries},
		{"services", 5, pins.Entries},
		{"source_range", 2, pins.Entries},
		{"hostports", 3, pins.Entries},
		{"uplinks", 1, 256},
		{"sources", 1, pins.Entries},
		{"snat", 7, pins.Entries}, // as the programs count
		{"snat_reverse", 3001, pins.Entries},
		{"conntrack", 1, pins.Entries},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}
