package lab

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"sync"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// netnsDir is where iproute2 looks for named namespaces, so that `ip netns exec` works on ours.
const netnsDir = "/run/netns"

// Namespace is a network namespace of the lab: a node, a pod, the outside host, a router or the fabric.
//
// It is also the place from which traffic is sent and served: see Serve, Ping, TCP, UDP and Transfer.
type Namespace struct {
	name string
	file *os.File
	nl   *netlink.Handle

	addrs    []netip.Addr  // in the order in which they are used
	families []wire.Family // that the lab has

	mu      sync.Mutex
	servers []*Server
}

// newNamespace makes a namespace and names it under /run/netns. Its loopback interface is up, nothing else is in it.
func newNamespace(name string) (*Namespace, error) {
	ns, err := nameNamespace(name, func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare the network: %w", err)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if err := ns.up("lo"); err != nil {
		ns.close()
		return nil, errors.Join(err, removeNamespace(name))
	}
	return ns, nil
}

// namespaceOfProcess names the namespace of a process that somebody else has started.
func namespaceOfProcess(name string, pid int) (*Namespace, error) {
	return nameNamespace(name, func() error {
		file, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", pid))
		if err != nil {
			return err
		}
		defer file.Close()
		if err := unix.Setns(int(file.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter the network of process %d: %w", pid, err)
		}
		return nil
	})
}

// nameNamespace names the namespace that enter takes the caller's thread to.
func nameNamespace(name string, enter func() error) (ns *Namespace, err error) {
	path := filepath.Join(netnsDir, name)
	target, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o444)
	if err != nil {
		return nil, fmt.Errorf("name namespace %s: %w", name, err)
	}
	target.Close()
	defer func() {
		if err != nil {
			_ = removeNamespace(name)
		}
	}()

	err = onOwnThread(func() error {
		if err := enter(); err != nil {
			return err
		}
		if err := unix.Mount("/proc/thread-self/ns/net", path, "none", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("bind the namespace to %s: %w", path, err)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("make namespace %s: %w", name, err)
	}
	return openNamespace(name)
}

// prepareNetnsDir makes the directory for names a shared mount point, as `ip netns add` does when it is none yet. Were it
// left to that command, it would cover names that exist already, and nobody could remove those any more. Like there, the
// mount stays for good.
func prepareNetnsDir() error {
	if err := os.MkdirAll(netnsDir, 0o755); err != nil {
		return fmt.Errorf("make %s: %w", netnsDir, err)
	}
	dir, err := os.Open(netnsDir)
	if err != nil {
		return fmt.Errorf("open %s: %w", netnsDir, err)
	}
	defer dir.Close()
	// The lock that iproute2 takes for the same purpose.
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", netnsDir, err)
	}
	share := func() error { return unix.Mount("", netnsDir, "none", unix.MS_SHARED|unix.MS_REC, "") }
	err = share()
	if errors.Is(err, unix.EINVAL) { // not a mount point
		if err = unix.Mount(netnsDir, netnsDir, "none", unix.MS_BIND|unix.MS_REC, ""); err == nil {
			err = share()
		}
	}
	if err != nil {
		return fmt.Errorf("make %s a shared mount: %w", netnsDir, err)
	}
	return nil
}

// openNamespace opens a namespace that exists under /run/netns.
func openNamespace(name string) (*Namespace, error) {
	file, err := os.Open(filepath.Join(netnsDir, name))
	if err != nil {
		return nil, fmt.Errorf("open namespace %s: %w", name, err)
	}
	nl, err := netlink.NewHandleAt(netns.NsHandle(file.Fd()), unix.NETLINK_ROUTE)
	if err != nil {
		file.Close()
		return nil, fmt.Errorf("netlink in namespace %s: %w", name, err)
	}
	return &Namespace{name: name, file: file, nl: nl}, nil
}

// removeNamespace takes the name away; the kernel ends the namespace when nothing else holds it. A name that is not
// there is no error.
func removeNamespace(name string) error {
	path := filepath.Join(netnsDir, name)
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("unmount %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove namespace %s: %w", name, err)
	}
	return nil
}

// close lets go of the namespace without removing it.
func (ns *Namespace) close() {
	ns.mu.Lock()
	servers := ns.servers
	ns.servers = nil
	ns.mu.Unlock()
	for _, server := range servers {
		server.Close()
	}
	ns.nl.Close()
	ns.file.Close()
}

// remove ends the namespace.
func (ns *Namespace) remove() error {
	ns.close()
	return removeNamespace(ns.name)
}

// Netns is the name under /run/netns, as `ip netns exec` takes it.
func (ns *Namespace) Netns() string { return ns.name }

// Path is what a container runtime passes as CNI_NETNS.
func (ns *Namespace) Path() string { return filepath.Join(netnsDir, ns.name) }

// Netlink is a route netlink handle inside the namespace.
func (ns *Namespace) Netlink() *netlink.Handle { return ns.nl }

// Do runs fn with the namespace as the current one, on a thread of its own. Sockets that fn opens and processes that
// it starts belong to the namespace for good; goroutines that it starts do not run in it.
//
// Do must not be given a function that calls t.FailNow: that would end the wrong goroutine, and is reported as an error.
func (ns *Namespace) Do(fn func() error) error {
	return onOwnThread(func() error {
		if err := unix.Setns(int(ns.file.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter namespace %s: %w", ns.name, err)
		}
		return fn()
	})
}

// onOwnThread runs fn on a locked thread and puts the thread's network namespace back afterwards. A thread that cannot
// be put back is never unlocked, so that the runtime ends it with its goroutine.
func onOwnThread(fn func() error) error {
	result := make(chan error, 1)
	go func() {
		err := errors.New("the function in the namespace ended without returning (runtime.Goexit, t.FailNow?)")
		defer func() { result <- err }()

		runtime.LockOSThread()
		home, openErr := os.Open("/proc/thread-self/ns/net")
		if openErr != nil {
			runtime.UnlockOSThread()
			err = fmt.Errorf("open the thread's network namespace: %w", openErr)
			return
		}
		defer home.Close()
		defer func() {
			if unix.Setns(int(home.Fd()), unix.CLONE_NEWNET) == nil {
				runtime.UnlockOSThread()
			}
		}()
		err = fn()
	}()
	return <-result
}

// WriteSysctl writes a network sysctl of the namespace, named as under /proc/sys ("net/ipv4/ip_forward").
func (ns *Namespace) WriteSysctl(name, value string) error {
	return ns.Do(func() error {
		if err := os.WriteFile(filepath.Join("/proc/sys", name), []byte(value), 0o644); err != nil {
			return fmt.Errorf("set sysctl %s in %s: %w", name, ns.name, err)
		}
		return nil
	})
}

// ReadSysctl reads a network sysctl of the namespace, without the newline.
func (ns *Namespace) ReadSysctl(name string) (value string, err error) {
	err = ns.Do(func() error {
		raw, err := os.ReadFile(filepath.Join("/proc/sys", name))
		if err != nil {
			return fmt.Errorf("read sysctl %s in %s: %w", name, ns.name, err)
		}
		for len(raw) > 0 && raw[len(raw)-1] == '\n' {
			raw = raw[:len(raw)-1]
		}
		value = string(raw)
		return nil
	})
	return value, err
}
