package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/config"
	"github.com/ebpf-cni/ebpf-cni/pkg/bpffs"
	"github.com/ebpf-cni/ebpf-cni/pkg/netfilter"
	"github.com/ebpf-cni/ebpf-cni/test/priv"
)

// cleanupVariable names the state and pin directories for which this executable is a cleanup of kube-proxy's rules, and no test.
const cleanupVariable = "EBPF_CNI_TEST_CLEANUP"

func TestMain(m *testing.M) {
	state, pins, isCleanup := strings.Cut(os.Getenv(cleanupVariable), ":")
	if !isCleanup {
		os.Exit(m.Run())
	}
	if err := CleanupKubeProxy(context.Background(), Directories{State: state, BPFFS: bpffs.Dir(pins)}, false, os.Stdout); err != nil {
		fmt.Fprintln(os.Stdout, err)
		os.Exit(1)
	}
}

// startCleanup starts a cleanup of kube-proxy's rules as a process beside the agent.
func (l *loop) startCleanup(t *testing.T) (*exec.Cmd, *bytes.Buffer, <-chan error) {
	t.Helper()
	out, ended := &bytes.Buffer{}, make(chan error, 1)
	process := exec.Command("/proc/self/exe")
	process.Env = append(os.Environ(), cleanupVariable+"="+l.cfg.State+":"+string(l.cfg.BPFFS))
	process.Stdout = out
	must(t, process.Start())
	go func() { ended <- process.Wait() }()
	return process, out, ended
}

// beside has an agent leave Services to kube-proxy's rules.
func beside(t *testing.T) *loop {
	t.Helper()
	l := testAuto(t)
	nat(t, "iptables-nft", kubeProxysRules)
	l.follow(t, time.Now().Add(time.Second))
	l.inspect(t.Context())
	if flags, _ := l.flags(t); flags&config.YieldsIPv4 == 0 {
		t.Fatalf("the agent does not leave Services to the rules: %#x", flags)
	}
	return l
}

func goes(t *testing.T, l *loop) bool {
	t.Helper()
	is, err := kubeProxyGoes(l.cfg.State)
	must(t, err)
	return is
}

func rulesStand(t *testing.T) bool {
	t.Helper()
	var rules netfilter.KubeProxy
	defer rules.Close()
	stand, err := rules.Look(time.Now())
	must(t, err)
	return stand != netfilter.Standing{}
}

// The agent serves before a rule is removed.
func TestCleanupOfKubeProxyWaitsForTheAgent(t *testing.T) {
	l := beside(t)
	_, out, ended := l.startCleanup(t)
	eventually(t, "the agent is told", func() bool { return goes(t, l) })
	time.Sleep(3 * relievePoll)
	if flags, _ := l.flags(t); !rulesStand(t) || flags&config.YieldsIPv4 == 0 {
		t.Fatalf("rules are removed before the agent serves: %s", out)
	}
	for tick := time.NewTicker(inspectInterval / 10); ; <-tick.C {
		l.inspect(t.Context())
		if flags, _ := l.flags(t); !rulesStand(t) && flags&config.YieldsIPv4 != 0 {
			t.Error("nobody serves")
		}
		select {
		case err := <-ended:
			tick.Stop()
			if want := "removed nftables table ip nat: 1 chains, and 2 rules that led there\n"; err != nil || out.String() != want {
				t.Errorf("error %v, said %q, want %q", err, out, want)
			}
			l.inspect(t.Context())
			if flags, _ := l.flags(t); flags&(config.YieldsIPv4|config.YieldsIPv6) != 0 || rulesStand(t) || !hasBridge(t) || goes(t, l) {
				t.Errorf("afterwards: flags %#x, rules stand: %v, bridge: %v", flags, rulesStand(t), hasBridge(t))
			}
			return
		default:
		}
	}
}

// A cleanup that is killed leaves Services to what stands.
func TestCleanupOfKubeProxyThatIsKilled(t *testing.T) {
	l := beside(t)
	process, out, ended := l.startCleanup(t)
	eventually(t, "the agent is told", func() bool { return goes(t, l) })
	must(t, process.Process.Kill())
	if err := <-ended; err == nil {
		t.Fatalf("it has ended by itself: %s", out)
	}
	l.inspect(t.Context())
	if flags, _ := l.flags(t); flags&config.YieldsIPv4 == 0 || !rulesStand(t) {
		t.Errorf("flags %#x, rules stand: %v", flags, rulesStand(t))
	}
}

// Where nobody would serve Services the rules stay, unless they are removed by force.
func TestCleanupOfKubeProxyWhereNobodyServes(t *testing.T) {
	flags := func(f config.Flags) func(*testing.T, *loop) {
		return func(t *testing.T, l *loop) {
			have, err := l.dp.Maps.Config.Get(config.Key{})
			must(t, err)
			have.Flags = f
			must(t, l.dp.Maps.Config.Put(config.Key{}, have))
		}
	}
	for _, tt := range []struct {
		name string
		make func(*testing.T, *loop)
		says string // empty: it is done
	}{
		{"Services are off", flags(0), "the programs serve no Services"},
		{"an agent that has ended", flags(config.Services | config.YieldsIPv6), "the programs leave Services to kube-proxy's rules: no agent runs, or it has --kube-proxy=on"},
		{"never an agent", func(_ *testing.T, l *loop) { l.cfg.BPFFS = bpffs.Dir(t.TempDir()) }, "no agent has loaded the programs"},
		{"no state directory", func(_ *testing.T, l *loop) { l.cfg.State = filepath.Join(l.cfg.State, "none") }, "kube-proxy.lock: no such file or directory"},
		{"host ports alone", func(t *testing.T, l *loop) {
			flags(config.Services)(t, l)
			names, err := l.dp.Maps.SetNames.Content()
			must(t, err)
			for k := range names {
				must(t, l.dp.Maps.SetNames.Delete(k))
			}
		}, "the programs know of no Service yet"},
		{"Services are on", flags(config.Services), ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := testAuto(t)
			tt.make(t, l)
			nat(t, "iptables-nft", kubeProxysRules)
			soon, cancel := context.WithTimeout(t.Context(), 3*relievePoll)
			defer cancel()
			var out bytes.Buffer
			err := CleanupKubeProxy(soon, l.cfg.Directories, false, &out)
			if tt.says == "" {
				if err != nil || rulesStand(t) || !hasBridge(t) || !strings.Contains(out.String(), "made nftables table inet ebpf-cni-flows") {
					t.Errorf("error %v, rules stand: %v, bridge: %v, said %s", err, rulesStand(t), hasBridge(t), &out)
				}
				return
			}
			if !errors.Is(err, ErrNeeded) || !strings.Contains(err.Error(), tt.says) || !rulesStand(t) || out.Len() > 0 || goes(t, l) {
				t.Errorf("%v; rules stand: %v, said %s", err, rulesStand(t), &out)
			}
			err = CleanupKubeProxy(soon, l.cfg.Directories, true, &out)
			if err != nil || rulesStand(t) || hasBridge(t) || !strings.Contains(out.String(), tt.says) {
				t.Errorf("by force: %v; rules stand: %v, said %s", err, rulesStand(t), &out)
			}
		})
	}
}

// Connections that would end are a reason too.
func TestCleanupOfKubeProxyWithoutTheBridge(t *testing.T) {
	priv.Isolate(t)
	var out bytes.Buffer
	withoutNetAdmin(t, func() {
		if err := keepConnections(&out); !errors.Is(err, ErrNeeded) || !errors.Is(err, unix.EPERM) {
			t.Error(err)
		}
	})
	for _, want := range []string{"made nftables table inet ebpf-cni-flows, ", ""} {
		out.Reset()
		if err := keepConnections(&out); err != nil || !strings.HasPrefix(out.String(), want) || want == "" && out.Len() > 0 {
			t.Errorf("said %q, error %v", &out, err)
		}
	}
}
