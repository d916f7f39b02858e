//! What does a template print for the date? `strftime` over a clock that is an argument, in UTC,
//! so that gateway and engine print the same.
//!
//! Left out on purpose: locales and time zones; directives that need them print themselves.

use std::fmt::Write;

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = [
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
];

const DAY_SECONDS: i64 = 86_400;

/// A moment in UTC, taken apart.
struct Moment {
    year: i64,
    /// 1 to 12.
    month: i64,
    /// 1 to 31.
    day: i64,
    /// 1 to 366.
    day_of_year: i64,
    /// 0 is Thursday, the day of the epoch.
    weekday: usize,
    hour: i64,
    minute: i64,
    second: i64,
}

/// Formats a moment as Python's `strftime` would in the C locale.
pub(crate) fn strftime(unix_seconds: i64, format: &str) -> String {
    let mut out = String::with_capacity(format.len() + 16);
    Moment::new(unix_seconds).format(format, &mut out);
    out
}

#[derive(Clone, Copy)]
enum Padding {
    Zeros,
    None,
}

impl Moment {
    fn new(unix_seconds: i64) -> Self {
        let days = unix_seconds.div_euclid(DAY_SECONDS);
        let seconds = unix_seconds.rem_euclid(DAY_SECONDS);
        // Howard Hinnant's civil_from_days: eras of 400 years that begin on 1 March.
        let shifted = days + 719_468;
        let era = shifted.div_euclid(146_097);
        let of_era = shifted.rem_euclid(146_097);
        let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
        let from_march = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let march_month = (5 * from_march + 2) / 153;
        let day = from_march - (153 * march_month + 2) / 5 + 1;
        let month = if march_month < 10 {
            march_month + 3
        } else {
            march_month - 9
        };
        let year = year_of_era + era * 400 + i64::from(month <= 2);
        let is_leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
        let day_of_year = if month > 2 {
            from_march + 60 + i64::from(is_leap)
        } else {
            from_march - 305
        };
        Self {
            year,
            month,
            day,
            day_of_year,
            weekday: days.rem_euclid(7) as usize,
            hour: seconds / 3600,
            minute: seconds / 60 % 60,
            second: seconds % 60,
        }
    }

    fn write(&self, out: &mut String, directive: char, padding: Padding) {
        let month = MONTHS[(self.month - 1) as usize];
        let weekday = DAYS[self.weekday];
        let hour_12 = (self.hour + 11) % 12 + 1;
        let (number, width) = match directive {
            'Y' => (self.year, 4),
            'y' => (self.year.rem_euclid(100), 2),
            'm' => (self.month, 2),
            'd' => (self.day, 2),
            'j' => (self.day_of_year, 3),
            'H' => (self.hour, 2),
            'I' => (hour_12, 2),
            'M' => (self.minute, 2),
            'S' => (self.second, 2),
            'B' => return out.push_str(month),
            'b' | 'h' => return out.push_str(&month[..3]),
            'A' => return out.push_str(weekday),
            'a' => return out.push_str(&weekday[..3]),
            'p' => return out.push_str(if self.hour < 12 { "AM" } else { "PM" }),
            'F' => return self.format("%Y-%m-%d", out),
            'T' => return self.format("%H:%M:%S", out),
            'D' => return self.format("%m/%d/%y", out),
            'Z' => return out.push_str("UTC"),
            'z' => return out.push_str("+0000"),
            '%' => return out.push('%'),
            other => {
                out.push('%');
                return out.push(other);
            }
        };
        let width = if matches!(padding, Padding::None) {
            0
        } else {
            width
        };
        // Writing to a String cannot fail.
        let _ = write!(out, "{number:0width$}");
    }

    fn format(&self, format: &str, out: &mut String) {
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            match chars.next() {
                // glibc's flag for no padding.
                Some('-') => match chars.next() {
                    Some(directive) => self.write(out, directive, Padding::None),
                    None => out.push_str("%-"),
                },
                Some(directive) => self.write(out, directive, Padding::Zeros),
                None => out.push('%'),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    //! Catches: a date that is off by one around leap years, midnight and the epoch.
    use super::strftime;

    #[test]
    fn formats_as_python_does() {
        let check = |seconds, format, expected: &str| {
            assert_eq!(strftime(seconds, format), expected, "{seconds} {format}");
        };
        // Expected values: datetime.fromtimestamp(s, timezone.utc).strftime(f) in Python 3.
        check(0, "%d %b %Y", "01 Jan 1970");
        check(-1, "%Y-%m-%d %H:%M:%S %a %j", "1969-12-31 23:59:59 Wed 365");
        check(
            951_782_400,
            "%A %d %B %Y %j",
            "Tuesday 29 February 2000 060",
        );
        check(951_868_800, "%F %j", "2000-03-01 061");
        check(4_107_542_400, "%F %j", "2100-03-01 060");
        check(1_735_689_599, "%F %T %j %y", "2024-12-31 23:59:59 366 24");
        check(
            1_700_000_000,
            "%-d/%-m %I:%M %p %Z%z %%",
            "14/11 10:13 PM UTC+0000 %",
        );
        check(1_700_000_000, "%D %q %", "11/14/23 %q %");
    }
}
