package agent

import (
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// A cleanup removes the link of the IPVS mode and rules, says so once, and finds nothing the second time.
func TestCleanupOfKubeProxy(t *testing.T) {
	priv.Isolate(t)
	link := "removed link kube-ipvs0\n"
	err := netlink.LinkAdd(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: ipvsName}})
	if errors.Is(err, unix.EOPNOTSUPP) { // no such link on this kernel, so no IPVS mode either
		link, err = "", nil
	}
	if err != nil {
		t.Fatal(err)
	}
	restore := exec.Command("iptables-nft-restore")
	restore.Stdin = strings.NewReader("*nat\n:KUBE-SERVICES - [0:0]\n:KUBE-NODEPORTS - [0:0]\n-A KUBE-SERVICES -j KUBE-NODEPORTS\nCOMMIT\n") // which translate nothing
	if out, err := restore.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, want := range []string{"removed nftables table ip nat: 2 chains, and 0 rules that led there\n" + link, ""} {
		var out bytes.Buffer
		if err := CleanupKubeProxy(t.Context(), Directories{State: t.TempDir()}, false, &out); err != nil || out.String() != want {
			t.Errorf("%q, error %v; want %q", out.String(), err, want)
		}
	}
}

// It refuses while a process of that name runs in its network namespace.
func TestCleanupBesideKubeProxy(t *testing.T) {
	priv.Isolate(t)
	program := filepath.Join(t.TempDir(), "kube-proxy")
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(sleep)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(program, content, 0o700); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	err = CleanupKubeProxy(t.Context(), Directories{}, false, io.Discard)
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if !errors.Is(err, ErrKubeProxy) {
		t.Errorf("beside one: %v", err)
	}
	if err := CleanupKubeProxy(t.Context(), Directories{}, false, io.Discard); err != nil {
		t.Errorf("after it: %v", err)
	}
}

func TestVirtualServersAreTold(t *testing.T) {
	proc := t.TempDir()
	if err := virtualServers(proc); err != nil {
		t.Errorf("without IPVS: %v", err)
	}
	if err := os.MkdirAll(filepath.Join(proc, "thread-self", "net"), 0o700); err != nil {
		t.Fatal(err)
	}
	head := "IP Virtual Server version 1.2.1 (size=4096)\nProt LocalAddress:Port Scheduler Flags\n  -> RemoteAddress:Port Forward Weight ActiveConn InActConn\n"
	for _, tt := range []struct{ list, want string }{
		{"", ""},
		{"TCP  0A600001:01BB rr\n  -> AC12000C:192B      Masq    1      0          0\nUDP  [fd00:0000:0000:0000:0000:0000:0000:0001]:0035 rr\n", "2 virtual servers"},
	} {
		if err := os.WriteFile(filepath.Join(proc, "thread-self", "net", "ip_vs"), []byte(head+tt.list), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := virtualServers(proc); (err != nil) != (tt.want != "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%q: %v", tt.list, err)
		}
	}
}
