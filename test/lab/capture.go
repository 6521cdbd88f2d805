package lab

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"golang.org/x/sys/unix"
)

// Capture collects what passes a link, in both directions, as a packet socket shows it.
type Capture struct {
	file *os.File
	done chan struct{}

	mu      sync.Mutex
	packets []gopacket.Packet
}

// Capture begins to collect the packets of a link until Close.
func (ns *Namespace) Capture(name string) (*Capture, error) {
	l, err := ns.nl.LinkByName(name)
	if err != nil {
		return nil, fmt.Errorf("capture on %s in %s: %w", name, ns.name, err)
	}
	const everything = unix.ETH_P_ALL<<8&0xff00 | unix.ETH_P_ALL>>8 // in network byte order
	var fd int
	err = ns.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, everything)
		if err != nil {
			return err
		}
		err = errors.Join(
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 32<<20),
			unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: everything, Ifindex: l.Attrs().Index}),
		)
		if err != nil {
			unix.Close(fd)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("capture on %s in %s: %w", name, ns.name, err)
	}
	c := &Capture{file: os.NewFile(uintptr(fd), "packet socket"), done: make(chan struct{})}
	go c.collect()
	return c, nil
}

func (c *Capture) collect() {
	defer close(c.done)
	frame := make([]byte, 1<<17)
	for {
		n, err := c.file.Read(frame)
		if err != nil {
			break // Close has been called, or the link is gone
		}
		c.add(frame[:n])
	}
	Drain(c.file, frame, c.add)
}

// Drain hands on what has arrived on a socket and was not read yet: after its deadline Read does not look any more. The
// socket must be one that never blocks, as all of Go's are.
func Drain(socket syscall.Conn, buffer []byte, each func([]byte)) {
	raw, err := socket.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		for {
			switch n, err := unix.Read(int(fd), buffer); {
			case err == nil:
				each(buffer[:n])
			case !errors.Is(err, unix.EINTR):
				return
			}
		}
	})
}

func (c *Capture) add(frame []byte) {
	packet := gopacket.NewPacket(bytes.Clone(frame), layers.LayerTypeEthernet, gopacket.Default)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.packets = append(c.packets, packet)
}

// Packets returns what has been collected so far.
func (c *Capture) Packets() []gopacket.Packet {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.packets)
}

// Close ends the capture and returns everything that it has collected.
func (c *Capture) Close() []gopacket.Packet {
	_ = c.file.SetReadDeadline(time.Now()) // wakes the reader; a packet socket has deadlines
	<-c.done
	c.file.Close()
	return c.Packets()
}

// SendRaw sends an IP packet, header and all: with any source, fragmented by hand, malformed above the header. The
// kernel writes the length and checksum of an IPv4 header, and a source or an id of 0; an IPv6 one goes as it is.
func (ns *Namespace) SendRaw(packet []byte) error {
	ip, ok := parseIP(packet)
	if !ok {
		return fmt.Errorf("send a raw packet from %s: it has no whole IP header", ns.name)
	}
	domain, to := unix.AF_INET6, unix.Sockaddr(&unix.SockaddrInet6{Addr: ip.destination.As16()})
	if ip.destination.Is4() {
		domain, to = unix.AF_INET, &unix.SockaddrInet4{Addr: ip.destination.As4()}
	}
	return ns.Do(func() error {
		fd, err := unix.Socket(domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return fmt.Errorf("open a raw socket in %s: %w", ns.name, err)
		}
		defer unix.Close(fd)
		err = errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BROADCAST, 1), unix.Sendto(fd, packet, 0, to))
		if err != nil {
			return fmt.Errorf("send a raw packet from %s: %w", ns.name, err)
		}
		return nil
	})
}
