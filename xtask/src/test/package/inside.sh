# The commands of an administrator with the package, as root under systemd. The script ends at the first command that fails.

said() { "$@" 2>&1 || true; }

# Installed: the service runs, as its own user, without capabilities.
# (Container images forbid packages to start services.)
rm -f /usr/sbin/policy-rc.d
names() { find /usr /lib/systemd /etc -xdev -name '*aryk*' -not -path '*/arykd.service.d*' | sort; }
useradd --no-create-home keeper
names >/run/before
dpkg -i /run/package.deb
systemctl is-active arykd.service
systemctl is-enabled arykd.service
usermod -aG aryk keeper
pid=$(systemctl show -P MainPID arykd.service)
[ "$(stat -c %U:%G /proc/$pid)" = aryk:aryk ] || [ "$(ps -o user= -p $pid)" = aryk ]
grep -q '^CapEff:	0*$' /proc/$pid/status
grep -q '^NoNewPrivs:	1$' /proc/$pid/status
grep -q '^Seccomp:	2$' /proc/$pid/status
# The service counts as started when the daemon answers, so the commands below wait only after a kill.
[ "$(stat -c %U:%G:%a /run/aryk/rpc.sock)" = aryk:aryk:660 ]
[ "$(stat -c %U:%G:%a /var/lib/aryk/state)" = aryk:aryk:750 ]

# A member of the group creates a disk and attaches it; other users are refused.
as() { runuser -u keeper -- "$@"; }
said runuser -u nobody -- aryk status | grep -qi 'permission denied'
as aryk status
as aryk disk create vm1 --file /var/lib/aryk/disks/vm1.img --size 64M
as aryk attach vm1 --socket-group kvm --socket-mode 660
[ "$(stat -c %G:%a /run/aryk/vm1)" = kvm:660 ]
usermod -aG kvm keeper
# The benchmark uses what the sandbox must permit: memory of another process, io_uring or threads, kernel AIO.
as aryk bench /run/aryk/vm1 --rw write --verify --destroy --qd 8 --time 1s
[ "$(cat /proc/sys/kernel/io_uring_disabled 2>/dev/null || echo 0)" != 0 ] || ls -l /proc/$pid/fd | grep -q io_uring
as aryk disk resize vm1 128M

# The daemon refuses disks in other directories; a new directory needs both the option and the drop-in.
said as aryk disk create passwd --file /etc/passwd | grep -q -- --allow-dir
mkdir -m 777 /srv/more
echo 'ARYKD_OPTIONS="--allow-dir /var/lib/aryk/disks --allow-dir /srv/more"' >/etc/default/arykd
systemctl restart arykd.service
as aryk status
said as aryk disk create more --file /srv/more/d.img --size 1M | grep -qi 'read-only file system'
mkdir -p /etc/systemd/system/arykd.service.d
printf '[Service]\nReadWritePaths=/srv/more\n' >/etc/systemd/system/arykd.service.d/disks.conf
systemctl daemon-reload
systemctl restart arykd.service
as aryk status
as aryk disk create more --file /srv/more/d.img --size 1M
as aryk disk remove more

# Killed: systemd starts another daemon, which restores the disk.
pid=$(systemctl show -P MainPID arykd.service)
kill -KILL $pid
for _ in $(seq 100); do as aryk disk show vm1 >/dev/null 2>&1 && break; sleep 0.1; done
[ "$(systemctl show -P MainPID arykd.service)" != $pid ]
as aryk bench /run/aryk/vm1 --rw read --qd 8 --time 1s

# With a supervisor, which is the main process for systemd.
sed -i 's/^ARYKD_OPTIONS="/&--supervise /' /etc/default/arykd
systemctl restart arykd.service
as aryk disk show vm1
pid=$(systemctl show -P MainPID arykd.service)
child=$(cat /proc/$pid/task/$pid/children)
kill -KILL $child
for _ in $(seq 100); do as aryk disk show vm1 >/dev/null 2>&1 && break; sleep 0.1; done
[ "$(systemctl show -P MainPID arykd.service)" = $pid ]

# With WatchdogSec=, systemd restarts a daemon that does not answer.
sed -i 's/--supervise //' /etc/default/arykd
printf '[Service]\nWatchdogSec=1s\n' >/etc/systemd/system/arykd.service.d/watchdog.conf
systemctl daemon-reload
systemctl restart arykd.service
pid=$(systemctl show -P MainPID arykd.service)
sleep 2
[ "$(systemctl show -P MainPID arykd.service)" = $pid ]
kill -STOP $pid
for _ in $(seq 100); do as timeout 1 aryk disk show vm1 >/dev/null 2>&1 && break; sleep 0.1; done
[ "$(systemctl show -P MainPID arykd.service)" != $pid ]

# Completion and man pages of the package.
[ -s /usr/share/bash-completion/completions/aryk ]
zgrep -q '^.TH' /usr/share/man/man1/aryk-attach.1.gz
zgrep -q '^.TH' /usr/share/man/man8/arykd.8.gz
bash -n /usr/share/bash-completion/completions/aryk

# Metrics and the web page on TCP: forbidden, with a hint, until the drop-in is installed; then for this host alone.
ip link set lo up
rm /etc/systemd/system/arykd.service.d/watchdog.conf
sed -i 's/^ARYKD_OPTIONS="/&--metrics 9477 --web 9478 /' /etc/default/arykd
printf '[Service]\nStandardError=append:/run/arykd.said\n' >/etc/systemd/system/arykd.service.d/said.conf
systemctl daemon-reload
said systemctl restart arykd.service
[ "$(systemctl show -P ActiveState arykd.service)" != active ]
grep -q 'TCP is forbidden here.*/usr/share/aryk/drop-ins/loopback.conf' /run/arykd.said
rm /etc/systemd/system/arykd.service.d/said.conf
install -D -m 644 -t /etc/systemd/system/arykd.service.d /usr/share/aryk/drop-ins/loopback.conf
systemctl daemon-reload
systemctl restart arykd.service
page() { timeout 5 bash -c "exec 3<>/dev/tcp/127.0.0.1/$1; printf 'GET $2 HTTP/1.0\r\nHost: localhost\r\n\r\n' >&3; cat <&3"; }
page 9477 /metrics | grep -q '^aryk_disk_ops_total{disk="vm1"'
page 9478 / | grep -q '<title>'
sed -i 's/--metrics 9477 --web 9478 /--metrics 0.0.0.0:9477 /' /etc/default/arykd
rm /etc/systemd/system/arykd.service.d/loopback.conf
install -D -m 644 -t /etc/systemd/system/arykd.service.d /usr/share/aryk/drop-ins/network.conf
systemctl daemon-reload
systemctl restart arykd.service
page 9477 /metrics | grep -q '^aryk_disk_ops_total{disk="vm1"'

# systemd knows every line of the service with all drop-ins, and of the unit that binds drives, which runs its command.
cp -r /etc/systemd/system/arykd.service.d /run/kept.d
install -D -m 644 -t /etc/systemd/system/arykd.service.d /usr/share/aryk/drop-ins/*.conf
drive=aryk-nvme-bind@0000:ff:1f.7.service
said systemd-analyze verify --man=no /lib/systemd/system/arykd.service /lib/systemd/system/aryk-nvme-bind@.service >/run/verified
[ ! -s /run/verified ] || { cat /run/verified; false; }
rm -r /etc/systemd/system/arykd.service.d
mv /run/kept.d /etc/systemd/system/arykd.service.d
mkdir -p /run/systemd/system/$drive.d
printf '[Service]\nStandardError=append:/run/bound\n' >/run/systemd/system/$drive.d/said.conf
systemctl daemon-reload
said systemctl start $drive
grep -q '0000:ff:1f.7: no such PCI function\|vfio-pci is not loaded' /run/bound || { cat /run/bound; false; }
systemctl stop $drive

# An upgrade leaves the running daemon and the administrator's options alone.
pid=$(systemctl show -P MainPID arykd.service)
dpkg -i /run/package.deb
[ "$(systemctl show -P MainPID arykd.service)" = $pid ]
grep -q /srv/more /etc/default/arykd

# Removed: the daemon has ended, the configuration stays. Purged: only the disks stay.
dpkg -r aryk
said systemctl is-active arykd.service | grep -q inactive
[ ! -e /usr/bin/arykd ]
[ -e /var/lib/aryk/state/state.redb ]
[ -e /etc/default/arykd ]
dpkg -P aryk
[ ! -e /etc/default/arykd ]
[ ! -e /var/lib/aryk/state ]
[ -s /var/lib/aryk/disks/vm1.img ]
names | diff /run/before -
