package endpoint

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/pkg/device"
)

// workOf asks for host ports, on a node whose kernel gives the ports from 32768 to 60999 to clients, but for some.
func workOf(t *testing.T, ports ...HostPort) *Work {
	t.Helper()
	w := &Work{Node: &Node{Sysctl: device.Sysctl{Dir: t.TempDir()}}}
	w.HostPorts = ports
	dir := filepath.Join(w.Sysctl.Dir, "net/ipv4")
	err := errors.Join(os.MkdirAll(dir, 0o700), os.WriteFile(filepath.Join(dir, "ip_local_port_range"), []byte("32768\t60999\n"), 0o600),
		os.WriteFile(filepath.Join(dir, "ip_local_reserved_ports"), []byte("33000,40000-40010\n"), 0o600))
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// takes reports whether a socket keeps a host port from a pod.
func takes(t *testing.T, l device.Listener, h HostPort) bool {
	t.Helper()
	err := workOf(t, h).passListeners(nil, func(byte) ([]device.Listener, error) { return []device.Listener{l}, nil })
	taken, is := errors.AsType[*HostPortTakenError](err)
	if err != nil && !is {
		t.Fatal(err)
	}
	return taken != nil
}

func port(at, protocol string) HostPort {
	a := netip.MustParseAddrPort(at)
	return HostPort{Address: a.Addr(), Port: a.Port(), Protocol: protocol, PodPort: 80}
}

// A daemon's socket on one address has that, and the pod the others; a person's keeps the port from the pod.
func TestDaemonOnOneAddress(t *testing.T) {
	for _, protocol := range []string{"tcp", "udp"} {
		for _, family := range [][2]string{{"0.0.0.0", "192.168.122.1"}, {"[::]", "[2001:db8::1]"}} {
			every, one := family[0]+":53", family[1]+":53"
			for uid, isPersons := range map[uint32]bool{0: false, 101: false, 999: false, 1000: true, 60000: true, 61184: false, 65534: false, 100000: true} {
				at := func(a string) device.Listener { return device.Listener{At: netip.MustParseAddrPort(a), UID: uid} }
				for _, tt := range []struct {
					socket, hostPort string
					want             bool
				}{{one, every, isPersons}, {one, one, true}, {every, every, true}, {every, one, true}} {
					if takes(t, at(tt.socket), port(tt.hostPort, protocol)) != tt.want {
						t.Errorf("user %d at %s takes %s %s: %t", uid, tt.socket, protocol, tt.hostPort, !tt.want)
					}
				}
			}
		}
	}
}

// A socket that is bound to a link, or to a VRF, keeps nothing from a pod.
func TestSocketOfALink(t *testing.T) {
	for _, at := range []string{"0.0.0.0:67", "192.0.2.1:67"} {
		for _, link := range []uint32{0, 7} {
			l := device.Listener{At: netip.MustParseAddrPort(at), UID: 1000, Ifindex: link}
			for _, h := range []HostPort{port("0.0.0.0:67", "udp"), port("192.0.2.1:67", "udp")} {
				if takes(t, l, h) != (link == 0) {
					t.Errorf("%+v takes %s: %t", l, h, link != 0)
				}
			}
		}
	}
}

// A daemon that asks over UDP keeps no port of the kernel's choice from a pod.
func TestClientsSocket(t *testing.T) {
	for _, tt := range []struct {
		at, protocol string
		uid          uint32
		want         bool
	}{
		{"0.0.0.0:32768", "udp", 0, false}, {"[::]:60999", "udp", 101, false}, {"0.0.0.0:40011", "udp", 0, false},
		{"0.0.0.0:32767", "udp", 0, true}, {"0.0.0.0:61000", "udp", 0, true},
		{"0.0.0.0:33000", "udp", 0, true}, {"0.0.0.0:40000", "udp", 0, true}, {"0.0.0.0:40010", "udp", 0, true},
		{"0.0.0.0:32768", "udp", 1000, true}, {"192.0.2.1:32768", "udp", 0, true}, {"0.0.0.0:32768", "tcp", 0, true},
	} {
		l := device.Listener{At: netip.MustParseAddrPort(tt.at), UID: tt.uid}
		if takes(t, l, port(tt.at, tt.protocol)) != tt.want {
			t.Errorf("%+v takes a %s port: %t", l, tt.protocol, !tt.want)
		}
	}
	if (clientPorts{}).has(0) || readClientPorts(device.Sysctl{Dir: t.TempDir()}) != (clientPorts{}) {
		t.Error("there are ports of clients where they can't be read")
	}
}

// Pods start where the kernel, or a profile of the container's, keeps sockets from being listed.
func TestSocketsCanNotBeListed(t *testing.T) {
	for _, errno := range []unix.Errno{unix.ENOENT, unix.EACCES, unix.EPERM, unix.EPROTONOSUPPORT, unix.ENOBUFS} {
		w, said := workOf(t, port("0.0.0.0:80", "tcp")), &bytes.Buffer{}
		w.Log = slog.New(slog.NewTextHandler(said, nil))
		err := w.passListeners(nil, func(byte) ([]device.Listener, error) { return nil, fmt.Errorf("list: %w", errno) })
		if err != nil || !strings.Contains(said.String(), "sockets can't be listed") {
			t.Errorf("%v: %v, says %s", errno, err, said)
		}
	}
}
